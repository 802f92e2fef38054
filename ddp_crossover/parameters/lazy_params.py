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
from ddp_crossover.own_threads import refuse_to_wait
from ddp_crossover.parameters.bystanders import may_look
from ddp_crossover.parameters.pending_parameter import arm, disarm, is_armed, is_armed_by, touch
from ddp_crossover.torch_internals import cover_of, is_in_backward, set_data, storage_use_count, unrecorded


class StaleParameterError(RuntimeError):
    """A parameter was read or written past everything while its update was pending."""


class LazyParam:
    """One parameter.

    Attributes:
        index: position among the parameters that DDP manages.
        name: full name, for messages.
        parameter: the parameter.
        memory: an ``nn.Parameter`` over the same memory, for the optimizer to update.
        is_waiting: whether the parameter is pending.
        version: autograd's version of the memory since ``step()``: another one means a write past everything.
        shadow: the value, where ``strict`` has put NaN.
        is_covered: whether who uses the parameter without asking it gets an error.
        was_covered: whether that was so from ``step()`` until its update was applied.
        why_never_lazy: the reason for which each of its updates is written in ``step()`` itself, or None.
    """

    __slots__ = (
        "_cover",
        "_params",
        "index",
        "is_covered",
        "is_waiting",
        "memory",
        "name",
        "neighbours",
        "parameter",
        "shadow",
        "storage",
        "version",
        "was_covered",
        "why_never_lazy",
    )

    def __init__(self, params: LazyParams, index: int, name: str, parameter: Parameter) -> None:
        self._params = params
        self.index = index
        self.name = name
        self.parameter = parameter
        self.is_waiting = self.is_covered = self.was_covered = False
        self.version = 0
        self.shadow: Tensor | None = None
        kind = type(parameter)
        self.why_never_lazy = None if kind is Parameter else f"is a {kind.__name__}, not an nn.Parameter itself"
        self.follow_memory()

    def follow_memory(self) -> None:
        """The parameter has got other memory, as by ``parameter.data = ...``."""
        self.memory = Parameter(self.parameter.detach(), self.parameter.requires_grad)
        # Optimizers look at attributes that users have set on a parameter.
        self.memory.__dict__ = self.parameter.__dict__
        self.storage = self.parameter.untyped_storage()
        self.neighbours = [self]
        self._cover = cover_of(
            self.memory.detach(),
            f"{self.name} waits for its update, and is used in a way that torch does not tell of, as by "
            "torch.tensor(p), TorchScript or an extension: use p.detach() there, or call state.synchronize() before",
        )

    def cover(self) -> None:
        """Nobody is to use the value without asking, while it waits for its update. Call it :func:`unrecorded`."""
        if self._cover is not None:
            self.is_covered = self.was_covered = True
            set_data(self.parameter, self._cover)
            if not self.is_waiting:  # a signal handler has had the update applied in between
                self.is_covered = True
                self.uncover()

    def uncover(self) -> None:
        """The update is going to be written. Call it :func:`unrecorded`."""
        if self.is_covered:
            set_data(self.parameter, self.memory)
            self.is_covered = False

    def use(self) -> None:
        """Somebody is about to see the value."""
        params = self._params
        refuse_to_wait()
        with params.lock:
            if self in params.updating:
                return
            if self.is_waiting:
                params.bring_up_to_date((self,))
            elif params.join is not None:
                params.join()
            if is_armed(self.parameter):
                params.on_use(self)
                disarm(self.parameter)

    def use_all(self) -> None:
        """Somebody may be about to see any value."""
        self._params.use_all()

    def why_not_lazy_now(self, references_alone: tuple[int, int]) -> str | None:
        """The reason for which its update must be written now, though its gradient was not read; or None."""
        extra = len(self.neighbours) - 1
        covered = sum(lazy.is_covered for lazy in self.neighbours) if extra else 0
        tensors, variables = references_alone
        if _references(self.storage) != (tensors + 2 * extra - covered, variables + extra):
            return "has memory that something else refers to (.data, detach(), a view, a graph that is still alive)"
        if self.memory.device.type == "cpu" and self.storage.is_shared():
            return "is in shared memory, where other processes may read it"
        return None

    @property
    def is_written(self) -> bool:
        """Whether C++ has written to the memory since ``step()``; views of one tensor share a version, and hide it."""
        return len(self.neighbours) == 1 and self.memory._version != self.version

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
        updating: those whose updates are being written.
        lock: held while updates are noted, applied or looked at. A signal handler may take it again.
        bring_up_to_date: called under the lock with parameters that somebody is about to see.
        join: on CUDA, lets the current stream wait for updates that were written on another one.
        why_none_is_lazy: the reason for which all updates must be written in ``step()`` itself, or None.
        on_use: told of each first touch since the parameter was armed.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self.lock = threading.RLock()
        self.updating: frozenset[LazyParam] = frozenset()
        self.join: Callable[[], None] | None = None
        self.why_none_is_lazy: str | None = None
        self.bring_up_to_date: Callable[[Iterable[LazyParam]], None] = lambda _: None
        self.on_use: Callable[[LazyParam], None] = lambda _: None
        # References to a storage that belongs to one parameter alone, as this version of torch counts them.
        self._references_alone = _references(LazyParam(self, 0, "", Parameter(torch.zeros(1))).storage)
        self.all = [LazyParam(self, index, name, parameter) for index, (name, parameter) in enumerate(named)]
        self.of_id = {id(lazy.parameter): lazy for lazy in self.all}
        self._find_neighbours()

    def let_go(self) -> None:
        """Of all parameters and their memory, without waiting for the collector of garbage."""
        for lazy in self.all:
            del lazy.parameter, lazy.memory, lazy.storage
        self.all.clear()
        self.of_id.clear()

    def arm_all(self) -> None:
        """Learn who touches which parameter, though nothing is pending."""
        with self.lock:
            for lazy in self.all:
                if type(lazy.parameter) is Parameter:
                    arm(lazy.parameter, lazy)

    def use_all(self) -> None:
        """Bring all parameters up to date, and make them plain."""
        refuse_to_wait()
        with self.lock:
            self.bring_up_to_date(self.all)
            for lazy in self.all:
                if lazy not in self.updating and is_armed(lazy.parameter):
                    disarm(lazy.parameter)

    def armed(self) -> list[LazyParam]:
        """Those that nobody has touched since they were armed."""
        return [lazy for lazy in self.all if is_armed(lazy.parameter)]

    def make_lazy(
        self, lazies: Sequence[LazyParam], note_update: Callable[[LazyParam], None], *, hide_values: bool
    ) -> None:
        """Let them wait for their updates, from now on. Call it under the lock.

        Args:
            lazies: the parameters.
            note_update: notes what is to be done for one of them.
            hide_values: put NaN into their memory meanwhile, instead of covering it.
        """
        # As the update would: a backward of an older graph must fail.
        torch.autograd.graph.increment_version([lazy.memory for lazy in lazies])
        # A thread that has asked its parameter a moment ago would get the error when it reads; so would a signal
        # handler inside of the end of a profiler's range, where torch asks no class.
        covers = not hide_values and not may_look()
        with unrecorded():
            for lazy in lazies:
                if hide_values:
                    lazy.shadow = lazy.memory.detach().clone()
                    lazy.memory.data.fill_(float("nan"))
                lazy.version = lazy.memory._version
                lazy.is_waiting, lazy.was_covered = True, False
                note_update(lazy)  # from here on a signal handler may apply it
                arm(lazy.parameter, lazy)
                if covers:
                    lazy.cover()

    def why_not_lazy(self, candidates: Sequence[LazyParam]) -> dict[LazyParam, str]:
        """Those whose updates must be written at the end of ``step()``, with the reason."""
        if self.why_none_is_lazy is not None:
            return dict.fromkeys(candidates, self.why_none_is_lazy)
        moved = []
        for lazy in candidates:
            if not is_armed(lazy.parameter):
                if not lazy.parameter.is_set_to(lazy.memory):
                    moved.append(lazy)
            elif not is_armed_by(lazy.parameter, lazy):
                touch(lazy.parameter)  # another model trains it, too
        for lazy in moved:
            lazy.follow_memory()
        if moved:
            self._find_neighbours()
        alone = self._references_alone
        why_not = {lazy: lazy.why_never_lazy or lazy.why_not_lazy_now(alone) for lazy in candidates}
        return {lazy: reason for lazy, reason in why_not.items() if reason is not None}

    def _find_neighbours(self) -> None:
        """Parameters in one storage; side by side, as in flattened RNN weights, they do not disturb each other."""
        in_storage: dict[int, list[LazyParam]] = {}
        for lazy in self.all:
            lazy.neighbours = in_storage.setdefault(lazy.storage._cdata, [])
            lazy.neighbours.append(lazy)
        for neighbours in in_storage.values():
            for lazy in neighbours if len(neighbours) > 1 else ():
                if any(_overlap(lazy, other) for other in neighbours):
                    lazy.why_never_lazy = "shares memory with another parameter"


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
        """Watch what has not been touched, though it could be read."""
        self.remove()
        self._touched_in_backward.clear()
        self._handles = [
            lazy.parameter.register_hook(_Gradient(lazy, self))
            for lazy in self._params.armed()
            if lazy.parameter.requires_grad and not lazy.was_covered
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
