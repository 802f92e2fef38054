"""The parameters of one model, each with what stands between it and its value.

States of a parameter, and who may see what:

* *plain*: an ``nn.Parameter``; its memory is right.
* *pending*: a ``PendingParameter``; ``step()`` has asked for an update. Whoever touches it, from any thread, has the
  update applied first. A group of parameters is updated together.
* *updating*: the update is being written. Still a ``PendingParameter``: other threads wait for the lock. A signal
  handler that has interrupted the update sees the memory as it is, as it would in the middle of a plain ``step()``.
* *untouched*: a ``PendingParameter`` whose memory is right, because its group was updated, and that nobody has touched
  since ``step()``. The first touch makes it plain.

    plain, untouched --step()--> pending --touch, or its group's--> updating --> untouched --touch--> plain

A parameter that is pending or untouched after a forward and gets a gradient all the same was read past everything.
Updates are written through a second tensor of the same memory, so they touch no parameter themselves.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from ddp_crossover.hooks import Hook
from ddp_crossover.pending_parameter import PendingParameter, arm, disarm, is_armed, is_armed_by, touch
from ddp_crossover.torch_internals import is_in_backward, storage_use_count


class StaleParameterError(RuntimeError):
    """A parameter was read or written past everything while its update was pending."""


class LazyParam:
    """One parameter.

    Attributes:
        index: position among the parameters that DDP manages.
        name: full name, for messages.
        parameter: the parameter.
        memory: an ``nn.Parameter`` over the same memory, for the optimizer to update.
        storage: of the same memory.
        neighbours: parameters in the same storage, this one among them.
        unseen_reads: whether code that no look-up of ours sees, such as TorchScript, reads it in forward.
        is_updating: whether its update is being written.
    """

    __slots__ = (
        "_params",
        "index",
        "is_updating",
        "memory",
        "name",
        "neighbours",
        "parameter",
        "storage",
        "unseen_reads",
    )

    def __init__(self, params: LazyParams, index: int, name: str, parameter: Parameter) -> None:
        self._params = params
        self.index = index
        self.name = name
        self.parameter = parameter
        self.neighbours: list[LazyParam] = [self]
        self.unseen_reads = False
        self.is_updating = False
        self.follow_memory()

    def follow_memory(self) -> None:
        """The parameter has got other memory, as by ``parameter.data = ...``."""
        self.memory = Parameter(self.parameter.detach(), self.parameter.requires_grad)
        # Optimizers look at attributes that users have set on a parameter.
        self.memory.__dict__ = self.parameter.__dict__
        self.storage = self.parameter.untyped_storage()

    @property
    def has_moved(self) -> bool:
        """Whether :attr:`memory` is not the parameter's any more. A pending parameter cannot have moved."""
        return not is_armed(self.parameter) and not self.parameter.is_set_to(self.memory)

    def arm(self) -> None:
        """Be asked before anybody sees the value."""
        arm(self.parameter, self)

    def use(self) -> None:
        """Somebody is about to see the value."""
        self._params.use(self)

    def use_all(self) -> None:
        """Somebody may be about to see any value."""
        self._params.use_all()

    def span(self) -> tuple[int, int]:
        """Addresses of its memory: [low, high)."""
        memory, low = self.memory, self.memory.data_ptr()
        if not memory.numel():
            return low, low
        last = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
        return low, low + (last + 1) * memory.element_size()


class LazyParams:
    """All parameters that DDP manages.

    Args:
        named: the parameters.

    Attributes:
        lock: held while updates are noted, applied or looked at. A signal handler may take it again.
        bring_up_to_date: called under the lock with parameters that somebody is about to see.
        why_none_is_lazy: the reason for which all updates must be written in ``step()`` itself, or None.
        on_use: told of each first touch since the parameter was armed.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self.lock = threading.RLock()
        self.why_none_is_lazy: str | None = None
        self.bring_up_to_date: Callable[[Iterable[LazyParam]], None] = lambda _: None
        self.on_use: Callable[[LazyParam], None] = lambda _: None
        # References to a storage that belongs to one parameter alone, as this version of torch counts them.
        alone = LazyParam(self, 0, "", Parameter(torch.zeros(1)))
        self._references_alone = _references(alone.storage)
        self.all = [LazyParam(self, index, name, parameter) for index, (name, parameter) in enumerate(named)]
        self._find_neighbours()

    def arm_all(self) -> None:
        """Learn who touches which parameter, though nothing is pending."""
        with self.lock:
            for lazy in self.all:
                if type(lazy.parameter) is Parameter:
                    lazy.arm()

    def use(self, lazy: LazyParam) -> None:
        """Bring one parameter up to date, and make it plain."""
        with self.lock:
            if not lazy.is_updating and is_armed(lazy.parameter):
                self.bring_up_to_date((lazy,))
                self.on_use(lazy)
                disarm(lazy.parameter)

    def use_all(self) -> None:
        """Bring all parameters up to date, and make them plain."""
        with self.lock:
            self.bring_up_to_date(self.all)
            for lazy in self.all:
                if not lazy.is_updating and is_armed(lazy.parameter):
                    disarm(lazy.parameter)

    def armed(self) -> list[LazyParam]:
        """Those that nobody has touched since they were armed."""
        return [lazy for lazy in self.all if is_armed(lazy.parameter)]

    def why_not_lazy(self, candidates: Sequence[LazyParam]) -> list[str | None]:
        """For each, the reason for which its update must be written in ``step()`` itself, or None."""
        for lazy in candidates:
            if is_armed(lazy.parameter) and not is_armed_by(lazy.parameter, lazy):
                touch(lazy.parameter)  # another model trains it, too
        moved = [lazy for lazy in candidates if lazy.has_moved]
        for lazy in moved:
            lazy.follow_memory()
        if moved:
            self._find_neighbours()
        return [self._why_not_lazy(lazy) for lazy in candidates]

    def _why_not_lazy(self, lazy: LazyParam) -> str | None:
        kind = type(lazy.parameter)
        if kind is not Parameter and kind is not PendingParameter:
            return f"is a {kind.__name__}, not an nn.Parameter itself"
        if self.why_none_is_lazy is not None:
            return self.why_none_is_lazy
        if lazy.unseen_reads:
            return "is read in forward where torch does not tell, as by TorchScript or an extension"
        if len(lazy.neighbours) > 1 and any(_overlap(lazy, other) for other in lazy.neighbours):
            return "shares memory with another parameter"
        extra = len(lazy.neighbours) - 1
        tensors, objects = self._references_alone
        if _references(lazy.storage) != (tensors + 2 * extra, objects + extra):
            return "has memory that something else refers to (.data, detach(), a view, a graph that is still alive)"
        if lazy.memory.device.type == "cpu" and lazy.storage.is_shared():
            return "is in shared memory, where other processes may read it"
        return None

    def _find_neighbours(self) -> None:
        in_storage: dict[int, list[LazyParam]] = {}
        for lazy in self.all:
            in_storage.setdefault(lazy.storage._cdata, []).append(lazy)
            lazy.neighbours = in_storage[lazy.storage._cdata]


def _references(storage: torch.UntypedStorage) -> tuple[int, int]:
    """How many tensors and how many Python variables refer to this memory, each plus a constant."""
    return storage_use_count(storage), sys.getrefcount(storage)


def _overlap(left: LazyParam, right: LazyParam) -> bool:
    if left is right:
        return False
    (left_low, left_high), (right_low, right_high) = left.span(), right.span()
    return left_low < right_high and right_low < left_high


class StaleReadGuard:
    """After a forward: what nobody has touched gets no gradient, else somebody has read it past everything.

    Args:
        params: the parameters.
        on_stale_read: called in backward with such a parameter.
    """

    def __init__(self, params: LazyParams, on_stale_read: Callable[[LazyParam], None]) -> None:
        self._params = params
        self._on_stale_read = on_stale_read
        self._touched_in_backward: set[LazyParam] = set()
        self._handles: list[RemovableHandle] = []

    def end_forward(self) -> None:
        """Watch what has not been touched."""
        self.remove()
        self._touched_in_backward.clear()
        self._handles = [
            lazy.parameter.register_hook(_Gradient(lazy, self))
            for lazy in self._params.armed()
            if lazy.parameter.requires_grad
        ]

    def note_touch(self, lazy: LazyParam) -> None:
        """A parameter was touched outside of a forward."""
        if self._handles and is_in_backward():
            self._touched_in_backward.add(lazy)

    def gradient_arrives(self, lazy: LazyParam) -> None:
        """Of a parameter that the forward has not touched; a penalty in the loss may have."""
        if is_armed(lazy.parameter) or lazy in self._touched_in_backward:
            self._on_stale_read(lazy)

    def remove(self) -> None:
        """Take the hooks down."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Gradient(Hook):
    """Gradient hook of a parameter that no forward has touched."""

    def __init__(self, lazy: LazyParam, guard: StaleReadGuard) -> None:
        self._lazy = lazy
        self._guard = guard

    def __call__(self, gradient: Tensor) -> None:
        self._guard.gradient_arrives(self._lazy)
