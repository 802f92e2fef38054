"""All parameters of one model: which of them can wait for their updates, and how they are made to.

For the states of each see ``lazy_param``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn import Parameter

from ddp_crossover import device as gpu
from ddp_crossover.own_threads import refuse_to_wait
from ddp_crossover.pending.lazy_param import Deferrer, LazyParam, references
from ddp_crossover.pending.other_threads import OtherThreads
from ddp_crossover.pending.pending_parameter import arm, disarm, is_armed, is_armed_by, touch
from ddp_crossover.torch_internals.autograd import unrecorded
from ddp_crossover.torch_internals.memory import Covers, memory_of, which_overlap
from ddp_crossover.torch_internals.profiling import let_handlers_look_up


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
        self._references_alone = references(LazyParam(self, 0, "", Parameter(torch.zeros(1, device="cpu"))).storage)
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
