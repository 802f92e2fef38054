"""PendingGrad: the ``param.grad`` of a gradient that is still on the wire.

Backward ends before the gradients have been summed over ranks. Until somebody looks, ``param.grad`` is a
:class:`PendingGrad`; the first operation that touches it waits for the legs of its fusion groups and from then on it
*is* the reduced gradient. Knows nothing of groups or legs: it is given a function that delivers the value.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ddp_crossover.own_threads import refuse_to_wait
from ddp_crossover.torch_internals import use_count

# What can be told without the value. Everything else waits.
_METADATA_NAMES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "names",
    "is_sparse",
    "is_sparse_csr",
    "is_cuda",
    "is_cpu",
    "is_quantized",
    "is_meta",
    "is_mkldnn",
    "is_nested",
    "is_leaf",
    "itemsize",
    "nbytes",
    "requires_grad",
    "grad_fn",
    "grad",
)
_METADATA_METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "stride",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "element_size",
    "get_device",
    "type",
    "requires_grad_",
    "detach_",
    "__len__",
    "__hash__",
)
_METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in _METADATA_NAMES if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _METADATA_METHODS if hasattr(Tensor, name)]
)
_ZERO_IN_PLACE = (Tensor.zero_, torch.zero_, torch._foreach_zero_)


class PendingGrad(Tensor):
    """A gradient that waits for its communication on first use.

    Same shape, dtype, device and strides as the gradient. Any torch function, in-place or not, works on the
    reduced value; ``type(param.grad)`` is the only difference that a reader sees.
    """

    _lock: threading.RLock
    _deliver: Callable[[Tensor], Tensor] | None
    _memory: Tensor | None
    _value: Tensor | None
    _wait_until_unread: Callable[[], None]

    @staticmethod
    def __new__(cls, like: Tensor, dtype: torch.dtype, lock: threading.RLock) -> PendingGrad:
        pending = Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device)
        pending._lock = lock
        pending._value = None
        pending._deliver = None
        pending._memory = None
        return pending

    def arm(
        self, deliver: Callable[[Tensor], Tensor], memory: Tensor, wait_until_unread: Callable[[], None] = lambda: None
    ) -> None:
        """Make it pending again.

        Args:
            deliver: waits, then returns the reduced gradient, in the memory that it is given or, where that belongs to
                the next gradient already, in memory of its own.
            memory: where plain DDP would leave the reduced gradient.
            wait_until_unread: waits until nobody reads this rank's own gradient from ``memory`` any more.
        """
        self._wait_until_unread = wait_until_unread
        self._value = None
        self._memory = memory
        self._deliver = deliver  # last: a signal handler may look in between

    @property
    def resolved(self) -> bool:
        """Whether the reduced gradient has been delivered already."""
        return self._deliver is None

    def resolve(self) -> Tensor:
        """Wait for the reduced gradient and return it as a plain tensor."""
        if self._deliver is not None:
            refuse_to_wait()
            with self._lock:
                if self._deliver is not None:  # no other thread was faster
                    assert self._memory is not None
                    self._value = self._deliver(self._memory)
                    self._deliver = None
        assert self._value is not None
        return self._value

    def own_value(self) -> Tensor:
        """As :meth:`resolve`; after it this object refers to the value once, whatever it has been through."""
        if self._deliver is not None:
            self.resolve()
        self._memory = None
        assert self._value is not None
        return self._value

    @property
    def is_free(self) -> bool:
        """Whether it has no gradient, to come or delivered."""
        return self._deliver is None and self._value is None

    def disarm(self) -> None:
        """Forget the gradient: nobody can ask for it any more."""
        self._deliver = None
        self._value = self._memory = None

    def overwrite_with_zeros(self) -> None:
        """What ``zero_grad(set_to_none=False)`` asks for needs no value, so it does not wait."""
        with self._lock:
            if self._deliver is None:
                assert self._value is not None
                self._value.zero_()
                return
            assert self._memory is not None
            self._wait_until_unread()
            self._value = self._memory.zero_()
            self._deliver = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _ZERO_IN_PLACE:
            targets = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            for target in targets:
                if isinstance(target, PendingGrad):
                    target.overwrite_with_zeros()
                else:
                    target.zero_()
            return args[0] if func is not torch._foreach_zero_ else None
        args, kwargs = tree_map_only(PendingGrad, PendingGrad.resolve, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reached from C++ only: AccumulateGrad adds to it, DDP's reducer copies it and into it.
        plain_args, plain_kwargs = tree_map_only(PendingGrad, PendingGrad.resolve, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        in_place = bool(args) and isinstance(args[0], PendingGrad) and out is plain_args[0]
        return args[0] if in_place else out


class PendingGradPool:
    """Makes one parameter's PendingGrads, one object for all steps where nobody else holds it.

    Making one costs microseconds a parameter; reusing it costs a tenth of that.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, lock: threading.RLock) -> None:
        self._like = like
        self._dtype = dtype
        self._lock = lock
        self._object = PendingGrad(like, dtype, lock)
        self._unshared_references = sys.getrefcount(self._object)

    def take(self, grad: Tensor) -> PendingGrad:
        """The object to put into ``param.grad``, whose present value is ``grad``; it forgets any other gradient."""
        pending = self._object
        if grad is pending:
            return pending
        if type(grad) is PendingGrad and grad.stride() == self._like.stride():
            self._object = grad  # of the plan before: whoever holds it sees what becomes of `param.grad`
        elif not pending.is_free:
            del pending  # would count
            if self.held_elsewhere():
                self._object = PendingGrad(self._like, self._dtype, self._lock)
            self._object.disarm()
        return self._object

    def is_current(self, grad: Tensor) -> bool:
        """Whether ``grad`` is the object that was taken last, and nobody has looked at it."""
        return grad is self._object and self._object._deliver is not None

    @property
    def current(self) -> PendingGrad:
        """The object that was taken last."""
        return self._object

    def held_elsewhere(self) -> bool:
        """Whether anybody but this pool refers to the object, in Python or in C++."""
        return sys.getrefcount(self._object) > self._unshared_references or (use_count(self._object) > 1)
