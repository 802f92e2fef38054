"""PendingGrad: the tensor in ``param.grad`` while the gradient is still on the wire.

Backward ends before the gradients have been summed over ranks, and leaves a :class:`PendingGrad` in ``param.grad``. The
first operation that needs its value waits for the legs of its fusion groups; from then on it behaves as the reduced
gradient. This module knows no groups or legs: it is given a function that delivers the value.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

from ddp_crossover.own_threads import refuse_to_wait
from ddp_crossover.torch_internals.memory import use_count

# Attributes and methods that need no value. All others wait for it.
_METADATA_NAMES = (
    *("shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes"),
    *("is_sparse", "is_sparse_csr", "is_cuda", "is_cpu", "is_quantized", "is_meta", "is_mkldnn", "is_nested"),
    *("is_leaf", "requires_grad", "grad_fn", "grad"),
)
_METADATA_METHODS = (
    *("size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("element_size", "get_device", "type", "requires_grad_", "detach_", "__len__", "__hash__"),
)
_METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in _METADATA_NAMES if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _METADATA_METHODS if hasattr(Tensor, name)]
)
_ZERO_IN_PLACE = (Tensor.zero_, torch.zero_, torch._foreach_zero_)


class PendingGrad(Tensor):
    """A gradient that waits for its communication on first use.

    It has the shape, dtype, device and strides of the gradient. Every torch function, in-place or not, works on the
    reduced value; ``type(param.grad)`` is the only visible difference.

    Attributes:
        becomes_zero: whether it was set to zero before it was delivered.
        was_added_to: whether a backward has added to it since it was armed.
        pool: refers to the pool whose ``current`` it was last.
    """

    _lock: threading.RLock
    _deliver: Callable[[Tensor], Tensor] | None
    _memory: Tensor | None
    _value: Tensor | None
    _zero: Callable[[Tensor], bool]
    becomes_zero: bool
    _answer_early: Callable[..., Any] | None
    _note_sum: Callable[[], None]
    was_added_to: bool
    pool: weakref.ref[PendingGradPool]

    @staticmethod
    def __new__(
        cls,
        shape: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        lock: threading.RLock,
    ) -> PendingGrad:
        pending = Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=device)
        pending._lock = lock
        pending._value = None
        pending._deliver = None
        pending._memory = None
        pending._answer_early = None
        pending.becomes_zero = pending.was_added_to = False
        return pending

    def arm(
        self,
        deliver: Callable[[Tensor], Tensor],
        memory: Tensor,
        zero: Callable[[Tensor], bool],
        answer_early: Callable[..., Any] | None = None,
        note_sum: Callable[[], None] = lambda: None,
    ) -> None:
        """Make this object stand for a new gradient that is on the wire.

        Args:
            deliver: waits for the legs and returns the reduced gradient. It uses the memory that it is given, or new
                memory where the given memory belongs to the next gradient already.
            memory: where plain DDP would leave the reduced gradient.
            zero: sets ``memory`` to zero in place of the reduced gradient; False if that has to wait for ``deliver``.
            answer_early: called with a torch function, its arguments and its keyword arguments; returns the result if
                it needs no gathered gradients for it, else ``NotImplemented``.
            note_sum: called when a backward is about to add this rank's own gradient to the reduced one.
        """
        self._note_sum = note_sum
        self._answer_early = answer_early
        self._zero = zero
        self.becomes_zero = self.was_added_to = False
        self._value = None
        self._memory = memory
        self._deliver = deliver  # last, because a signal handler may resolve it in between

    @property
    def resolved(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self._deliver is None

    @property
    def is_reduced_gradient(self) -> bool:
        """Whether it stands for a gradient that is on the wire, and was neither read nor set to zero."""
        return self._deliver is not None and not self.becomes_zero

    def resolve(self) -> Tensor:
        """Wait for the reduced gradient and return it as a plain tensor.

        Raises:
            RuntimeError: in a thread on which legs depend.
        """
        if self._deliver is not None:
            refuse_to_wait()
            with self._lock:
                if self._deliver is not None:  # another thread may have delivered it meanwhile
                    assert self._memory is not None
                    value = self._deliver(self._memory)
                    self._value = value.zero_() if self.becomes_zero else value
                    self._deliver = None
        assert self._value is not None
        return self._value

    def like(self) -> Tensor:
        """Return a plain tensor of the gradient's shape, dtype, device and strides, with any values, without a wait."""
        # Without the lock: a delivery sets the value before it drops anything.
        like = self._value if self._value is not None else self._memory
        return like if like is not None else self.resolve()

    def own_value(self) -> Tensor:
        """As :meth:`resolve`, and drop ``_memory``, so that this object holds exactly one reference to the value."""
        if self._deliver is not None:
            self.resolve()
        self._memory = None
        assert self._value is not None
        return self._value

    def is_answered_by(self, answer: Callable[..., Any]) -> bool:
        """Whether it was armed with this function as ``answer_early``."""
        return self._answer_early == answer

    def is_added_to(self) -> None:
        """Note that a backward adds to it."""
        self.was_added_to = True
        self._note_sum()

    @property
    def is_free(self) -> bool:
        """Whether it holds no gradient, neither pending nor delivered."""
        return self._deliver is None and self._value is None

    def abandon(self, why: str) -> None:
        """Have every read raise RuntimeError with this reason from now on, because the gradient is gone."""

        def refuse(memory: Tensor) -> Tensor:
            raise RuntimeError(why)

        self._deliver = refuse

    def move_to(self, pool: PendingGradPool) -> None:
        """Note of which pool it is the ``current`` one."""
        self.pool = weakref.ref(pool)

    def leave(self) -> None:
        """Stand for the value alone, which has been delivered: what it was armed with is about to be dropped."""
        if self._deliver is None:
            self._answer_early = None
            self._note_sum = lambda: None
            self._zero = lambda memory: False

    def move(self) -> None:
        """Wait for it, and put it into memory of its own: what it stands for is about to be overwritten."""
        self._value = self.resolve().clone()
        self._memory = None

    def disarm(self) -> None:
        """Drop the gradient, which can no longer be read because only the pool refers to this object."""
        self._deliver = None
        self._value = self._memory = None

    def overwrite_with_zeros(self) -> None:
        """Set it to zero, as ``zero_grad(set_to_none=False)`` does, without waiting for the reduced gradient."""
        with self._lock:
            if self._deliver is None:
                assert self._value is not None
                self._value.zero_()
                return
            assert self._memory is not None
            self.becomes_zero = True  # first, because a signal handler may resolve it at any place below
            if self._zero(memory := self._memory) and self._deliver is not None:
                self._value = memory
                self._deliver = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _ZERO_IN_PLACE:
            for target in _first(args):
                if isinstance(target, PendingGrad):
                    target.overwrite_with_zeros()
                else:
                    target.zero_()
            return args[0] if func is not torch._foreach_zero_ else None
        if (answer_early := _answer_early(args)) is not None:
            answer = answer_early(func, args, kwargs)
            if answer is not NotImplemented:
                return answer
        args, kwargs = tree_map_only(PendingGrad, PendingGrad.resolve, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Called from C++ only: AccumulateGrad adds to the gradient, DDP's reducer copies from and to it.
        written = _first(args) if args and _writes_to_first(func) else ()
        for each in written:
            if isinstance(each, PendingGrad):
                each.is_added_to()
        if args and written is args[0]:
            # A list: DDP with batched_grad_copy=True. Torch does not raise versions there: see
            # findings/foreach_keeps_versions_of_subclasses.sh.
            increment_version(written)
        plain_args, plain_kwargs = tree_map_only(PendingGrad, PendingGrad.resolve, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        return args[0] if written and isinstance(args[0], PendingGrad) else out


def resolved(gradient: Tensor | None) -> Tensor:
    """The gradient as a plain tensor, after a wait if it is pending."""
    assert gradient is not None
    return gradient.resolve() if isinstance(gradient, PendingGrad) else gradient


def _first(args: Sequence[Any]) -> Sequence[Any]:
    """What is in the first argument, if that is a list of tensors; else that argument alone."""
    return args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]


def _writes_to_first(func: Any) -> bool:
    alias = func._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def _answer_early(args: Sequence[Any]) -> Callable[..., Any] | None:
    """What may answer a call of a torch function without gathered gradients: that of the first gradient in ``args``."""
    found = (each._answer_early for each in _first(args) if isinstance(each, PendingGrad))
    return next((answer for answer in found if answer is not None), None)


class PendingGradPool:
    """Makes the PendingGrads of one parameter, and reuses one object across steps while only the pool refers to it.

    Making one takes microseconds per parameter; reusing one takes a tenth of that.

    Attributes:
        current: the object that was taken last.
    """

    def __init__(
        self,
        shape: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        lock: threading.RLock,
    ) -> None:
        self._stride = stride
        self._new = functools.partial(PendingGrad, shape, stride, dtype, device, lock)
        self.current = self._make()
        self._unshared_references = sys.getrefcount(self.current)

    def take(self, grad: Tensor, *, is_in_bucket: bool) -> PendingGrad:
        """The object for ``param.grad``, which now holds ``grad``. Drops any other gradient from that object.

        Args:
            grad: what is in ``param.grad``.
            is_in_bucket: whether DDP puts what backward has added to ``param.grad`` into its bucket, and leaves that
                there. Else ``param.grad`` is still the object if it was that when backward came to it.
        """
        pending = self.current
        if grad is pending:
            return pending
        if type(grad) is PendingGrad and grad.stride() == self._stride:
            # Made under the last plan, or for another model that shares the parameter, whose gradient was added to: its
            # holders expect it to follow `param.grad`.
            if (other := grad.pool()) is not None and other.current is grad:
                grad.resolve()
                other.part()
            self.current = grad
            grad.move_to(self)
        elif not pending.is_free:
            follows = is_in_bucket and pending.was_added_to  # as a part of the bucket, where DDP has put the sum
            del pending  # this name would count as a reference
            if not follows and self.held_elsewhere():
                self.current = self._make()
            self.current.disarm()
        return self.current

    def part(self) -> None:
        """Leave the object to another parameter, whose ``.grad`` it is now, or to another pool."""
        self.current = self._make()

    def _make(self) -> PendingGrad:
        pending = self._new()
        pending.move_to(self)
        return pending

    def is_current(self, grad: Tensor) -> bool:
        """Whether ``grad`` is the object that was taken last, and was neither read nor set to zero."""
        return grad is self.current and self.current.is_reduced_gradient

    def held_elsewhere(self) -> bool:
        """Whether anything but this pool refers to the object, in Python or in C++."""
        return sys.getrefcount(self.current) > self._unshared_references or (use_count(self.current) > 1)
