"""The parameters of one model, and the state of each parameter's pending update.

States of a parameter:

* *plain*: an ``nn.Parameter`` with an up-to-date value.
* *pending*: a ``PendingParameter`` whose update was deferred by ``step()``. A touch, from any thread, applies the
  update first, together with those of the other parameters in its fusion group.
* *updating*: the update is being written. The class is still ``PendingParameter``, and other threads wait for the lock.
  A signal handler that interrupts the update sees the memory half updated, as it would during a plain ``step()``.
* *untouched*: a ``PendingParameter`` whose value is up to date, because its group was updated, but that has not been
  touched since ``step()``. The first touch makes it plain. Only where that touch has to be seen, see ``see_all_uses``.

    plain, untouched --step()--> pending --touch, or its group's--> updating --> untouched --touch--> plain
                                                                            \\----------------------^

Updates are written through a second tensor of the same memory, so that they do not touch the parameters themselves.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_crossover import device as gpu
from ddp_crossover.own_threads import refuse_to_wait
from ddp_crossover.pending.other_threads import OtherThreads
from ddp_crossover.pending.pending_parameter import arm, disarm, is_armed, is_armed_by, touch
from ddp_crossover.torch_internals.autograd import unrecorded
from ddp_crossover.torch_internals.memory import Covers, memory_of, set_data, storage_use_count, which_overlap
from ddp_crossover.torch_internals.profiling import let_handlers_look_up


class StaleParameterError(RuntimeError):
    """A parameter was read or written while its update was pending, by code that bypasses ``__torch_function__``."""


class Deferrer(Protocol):
    """Who has made parameters pending, and updates them."""

    def bring_up_to_date(self, lazies: Iterable[LazyParam]) -> None:
        """Apply the pending updates of these parameters, whose values are about to be used. Called under the lock."""

    def join(self) -> None:
        """On CUDA, make the current stream wait for updates that were written on another stream."""


class LazyParam:
    """One parameter, its memory, and whether its update is pending.

    Attributes:
        index: position among the parameters that DDP manages.
        name: full name, for messages.
        parameter: the parameter.
        memory: an ``nn.Parameter`` over the same memory, for the optimizer to update.
        is_waiting: whether the parameter is pending.
        version: autograd's version counter of the memory after ``step()``, or after its update: a change means that
            somebody else has written.
        shadow: a copy of the value while ``strict`` fills the memory with NaN, else None.
        is_covered: whether the parameter points to its cover, so that unobserved reads do not find the old value.
        was_covered: whether they raised an error from ``step()`` until its update was applied.
        overlaps: whether its memory overlaps that of another parameter.
        why_never_lazy: why its updates are never deferred, or None.
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
        "overlaps",
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
        self.is_waiting = self.is_covered = self.was_covered = self.overlaps = False
        self.shadow: Tensor | None = None
        kind = type(parameter)
        self.why_never_lazy = None if kind is Parameter else f"is a {kind.__name__}, a subclass of nn.Parameter"
        self.follow_memory()

    def follow_memory(self) -> None:
        """Use the parameter's new memory, after ``parameter.data = ...`` for instance."""
        # As no update of a frozen parameter is deferred, the optimizer meets only those that require a gradient.
        self.memory = Parameter(self.parameter.detach())
        # Optimizers look at attributes that users have set on a parameter.
        self.memory.__dict__ = self.parameter.__dict__
        self.storage = self.parameter.untyped_storage()
        self.neighbours = [self]
        self.version = -1  # of what the script has put there
        self._cover = self._params.covers.make(
            self.memory.detach(),
            f"{self.name} is used while ddp_crossover has its update pending, by code that bypasses "
            "__torch_function__ (torch.tensor(p), TorchScript, a C++ extension): pass p.detach() instead of the "
            "parameter, or call state.synchronize() first",
        )

    def share_storage(self, neighbours: list[LazyParam]) -> None:
        """Join the parameters whose memory lies in the same storage."""
        self.neighbours = neighbours
        neighbours.append(self)

    def cover(self) -> None:
        """Keep reads and writes that bypass the class from the old value, if the update is still pending.

        Call in :func:`unrecorded`.
        """
        is_waiting = self.is_waiting
        if self._cover is not None and is_waiting:
            self.is_covered, self.was_covered = True, self._params.covers.raise_errors
            set_data(self.parameter, self._cover)
            if not self.is_waiting:  # a signal handler applied the update meanwhile
                self.is_covered = True
                self.uncover()

    def uncover(self) -> None:
        """Remove the cover before the update is written. Call in :func:`unrecorded`."""
        if self.is_covered:
            set_data(self.parameter, self.memory)
            self.is_covered = False

    def use(self) -> None:
        """Apply the update if it is pending, and make the parameter plain, because its value is about to be used."""
        params = self._params
        refuse_to_wait()
        with params.lock:
            if self in params.updating:
                return
            if params.deferrer is not None:
                if self.is_waiting:
                    params.deferrer.bring_up_to_date((self,))
                else:
                    params.deferrer.join()
            if is_armed(self.parameter):
                params.on_use(self)
                disarm(self.parameter)

    def note_overlap(self, overlaps: bool) -> None:
        """Note whether its memory overlaps that of another parameter: one then has to be updated before the other."""
        self.overlaps = overlaps
        if overlaps:
            self.never_defer("overlaps in memory with another parameter")

    def end_wait(self) -> None:
        """Note that the update is being applied, or was taken back."""
        self.is_waiting = False

    def never_defer(self, reason: str) -> None:
        """Apply updates of this parameter at the end of each ``step()`` from now on."""
        self.why_never_lazy = reason

    def expect_version(self) -> None:
        """Take any write from now on for one of somebody else."""
        self.version = self.memory._version

    @property
    def is_edited(self) -> bool:
        """Whether others have written to the memory since its last update, or a neighbour's update has."""
        return self.memory._version != self.version

    def show_value(self) -> None:
        """Restore the value hidden by ``strict``, and raise if the memory was written to while the update was pending.

        Raises:
            StaleParameterError: code that torch cannot observe wrote to the parameter.
        """
        is_written = self.is_written
        if self.shadow is not None:
            is_written = is_written or not bool(self.memory.isnan().all())
            self.memory.data.copy_(self.shadow)
            self.shadow = None
        if is_written:
            raise StaleParameterError(
                f"{self.name} was written while its deferred update was pending, by code that bypasses "
                "__torch_function__ (a C++ extension, or a pointer from data_ptr()): call state.synchronize() before "
                "such a write, so that it changes the updated value"
            )

    def hide_value(self) -> None:
        """Fill the memory with NaN until :meth:`show_value`."""
        self.shadow = self.memory.detach().clone()
        self.memory.data.fill_(float("nan"))

    def begin_wait(self) -> None:
        """Note that the update is pending."""
        self.version = self.memory._version
        self.is_waiting, self.was_covered = True, False

    def use_all(self) -> None:
        """Apply all pending updates of the model, because any of its values may be about to be used."""
        self._params.use_all()

    def why_not_lazy_now(self, references_alone: tuple[int, int]) -> str | None:
        """Why this update cannot be deferred although the gradient was not read; None if it can be."""
        extra = len(self.neighbours) - 1
        covered = sum(lazy.is_covered for lazy in self.neighbours) if extra else 0
        tensors, variables = references_alone
        if _references(self.storage) != (tensors + 2 * extra - covered, variables + extra):
            return (
                "shares its memory with another tensor (p.data, p.detach(), a view, or an autograd graph that is still "
                "alive). Drop that tensor before optimizer.step(), or keep a clone instead, to have the update deferred"
            )
        if self.memory.is_cpu and self.storage.is_shared():
            return "is in shared memory, where another process may read it at any time"
        return None

    @property
    def is_written(self) -> bool:
        """Whether C++ wrote to the memory since ``step()``.

        Always False for parameters in a common storage: they share a version counter, which every update raises.
        """
        return len(self.neighbours) == 1 and self.memory._version != self.version


class LazyParams:
    """All parameters that DDP manages.

    Args:
        named: names and parameters, in DDP's order.

    Attributes:
        updating: the parameters whose updates are being written.
        covers: makes the memory that parameters point to while their updates are pending.
        lock: held while updates are deferred, applied or checked. Re-entrant, because signal handlers take it too.
        deferrer: who has made parameters pending; None before the first time.
        why_none_is_lazy: why no update may be deferred, or None.
        on_use: called at the first touch of a parameter after it was armed.
        see_all_uses: whether parameters whose updates were applied stay armed until each is touched itself.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self.lock = threading.RLock()
        self.covers = Covers()
        self._other_threads = OtherThreads()
        let_handlers_look_up()
        self.updating: frozenset[LazyParam] = frozenset()
        self.deferrer: Deferrer | None = None
        self.why_none_is_lazy: str | None = None
        self.on_use: Callable[[LazyParam], None] = lambda _: None
        self.see_all_uses = True
        # Reference counts of a storage without aliases. Measured, because they differ between versions of torch.
        self._references_alone = _references(LazyParam(self, 0, "", Parameter(torch.zeros(1))).storage)
        self.all = [LazyParam(self, index, name, parameter) for index, (name, parameter) in enumerate(named)]
        self.of_id = {id(lazy.parameter): lazy for lazy in self.all}
        self._has_streams = any(gpu.has_streams(parameter.device) for _, parameter in named)
        self._find_neighbours()

    def make_none_lazy(self, why: str) -> None:
        """Let no update be deferred from now on."""
        self.why_none_is_lazy = why

    def drop_references(self) -> None:
        """Drop all parameters and their memory now, without waiting for garbage collection."""
        for lazy in self.all:
            del lazy.parameter, lazy.memory, lazy.storage
        self.all.clear()
        self.of_id.clear()

    def arm_all(self) -> None:
        """Arm all plain parameters, to observe their first touches although no update is pending."""
        with self.lock:
            for lazy in self.all:
                if type(lazy.parameter) is Parameter:
                    arm(lazy.parameter, lazy)

    def use_all(self) -> None:
        """Apply all pending updates, and make all parameters plain."""
        refuse_to_wait()
        with self.lock:
            if self.deferrer is not None:
                self.deferrer.bring_up_to_date(self.all)
            for lazy in self.all:
                if lazy not in self.updating and is_armed(lazy.parameter):
                    disarm(lazy.parameter)

    def armed(self) -> list[LazyParam]:
        """The parameters that have not been touched since they were armed."""
        return [lazy for lazy in self.all if is_armed(lazy.parameter)]

    def watch_uses(self, on_use: Callable[[LazyParam], None], *, see_all: bool) -> None:
        """Call ``on_use`` at the first touch of each parameter after it was armed, from now on.

        Args:
            on_use: what to call.
            see_all: if False, it is enough to call it for all parameters of a fusion group when one is touched.
        """
        self.on_use = on_use
        self.see_all_uses = see_all

    def end_updates(self, lazies: Iterable[LazyParam]) -> None:
        """Make these parameters plain, whose updates were applied, if nobody has to see the first touch of each.

        Where no cover has kept unobserved reads away, that touch shows that there was none. On a device with streams it
        makes the stream wait on which the parameter is used.
        """
        if self.see_all_uses or self._has_streams:
            return
        for lazy in lazies:
            if lazy.was_covered and is_armed_by(lazy.parameter, lazy):
                self.on_use(lazy)
                disarm(lazy.parameter)

    @contextmanager
    def being_updated(self, lazies: Iterable[LazyParam]) -> Iterator[None]:
        """Context in which the updates of these parameters are written: a use of them waits for nothing."""
        before, self.updating = self.updating, self.updating.union(lazies)
        try:
            yield
        finally:
            self.updating = before

    def make_lazy(
        self,
        lazies: Sequence[LazyParam],
        note_update: Callable[[LazyParam], None],
        *,
        by: Deferrer,
        hide_values: bool,
    ) -> None:
        """Make these parameters pending. Call it under the lock.

        Args:
            lazies: the parameters.
            note_update: records the deferred update of one of them.
            by: applies the updates when they are needed.
            hide_values: fill their memory with NaN until the update.
        """
        self.deferrer = by
        # The update would raise the version, too, so that a backward of an older graph fails.
        torch.autograd.graph.increment_version([lazy.memory for lazy in lazies])
        with unrecorded():
            for lazy in lazies:
                if hide_values:
                    lazy.hide_value()
                lazy.begin_wait()
                note_update(lazy)  # a signal handler may apply the update from here on
                arm(lazy.parameter, lazy)

    def cover(self, lazies: Sequence[LazyParam]) -> str | None:
        """Cover the parameters that :meth:`make_lazy` has made pending, before ``step()`` returns.

        Returns:
            Why they could not be covered, so that their updates must be applied now; None if they were.
        """
        # A cover would break a valid reader: a thread that has looked up `__torch_function__` and not yet run its
        # kernel. Now that all are armed, who looks it up asks for the update first.
        straggler = self._other_threads.find_straggler() if lazies else None
        if straggler is not None:
            return (
                f"updates were applied in optimizer.step(), because the thread {straggler} may have been using "
                "parameters at that moment. To have them deferred, let it wait while step() runs, or do its work in "
                "another process"
            )
        with unrecorded():
            for lazy in lazies:
                lazy.cover()
        return None

    def why_not_lazy(self, candidates: Sequence[LazyParam]) -> dict[LazyParam, str]:
        """The candidates whose updates must be applied at the end of ``step()``, each with the reason."""
        if self.why_none_is_lazy is not None:
            return dict.fromkeys(candidates, self.why_none_is_lazy)
        for lazy in candidates:
            if is_armed(lazy.parameter) and not is_armed_by(lazy.parameter, lazy):
                touch(lazy.parameter)  # armed by another model that trains it, too
        self.follow_moved(candidates)
        alone = self._references_alone
        why_not = {lazy: lazy.why_never_lazy or lazy.why_not_lazy_now(alone) for lazy in candidates}
        return {lazy: reason for lazy, reason in why_not.items() if reason is not None}

    def follow_moved(self, candidates: Sequence[LazyParam]) -> None:
        """Use the new memory of those that have been moved, by ``parameter.data = ...`` for instance."""
        idle = [lazy for lazy in candidates if not lazy.is_waiting]
        moved = [lazy for lazy in idle if not is_armed(lazy.parameter) and not lazy.parameter.is_set_to(lazy.memory)]
        for lazy in moved:
            lazy.follow_memory()
        # Those that are armed only so that their first use is seen may have moved before. This look is no use.
        if watched := [lazy for lazy in idle if is_armed(lazy.parameter)]:
            with torch._C.DisableTorchFunctionSubclass():
                moved += (late := [lazy for lazy in watched if not lazy.parameter.is_set_to(lazy.memory)])
                for lazy in late:
                    lazy.follow_memory()
        if moved:
            self._find_neighbours()

    def _find_neighbours(self) -> None:
        """Find parameters that share a storage, such as flattened RNN weights; those that overlap are never lazy."""
        in_storage: dict[int, list[LazyParam]] = {}
        for lazy in self.all:
            lazy.share_storage(in_storage.setdefault(lazy.storage._cdata, []))
        together = (lazy for lazy in self.all if len(lazy.neighbours) > 1)
        overlapping = which_overlap((memory_of(lazy.memory), lazy.index) for lazy in together)
        for lazy in self.all:
            lazy.note_overlap(lazy.index in overlapping)


def _references(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Numbers of tensors and of Python variables that refer to this storage, each plus a constant."""
    return storage_use_count(storage), sys.getrefcount(storage)
