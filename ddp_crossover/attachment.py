"""One model that is attached: its parts, from attach until something ends it.

It ends by ``detach()`` on all ranks, because nothing can be gained, with the model, or in a forked child.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.comm.leg import LegError
from ddp_crossover.composition import compose
from ddp_crossover.fusion import Schedule
from ddp_crossover.options import SWITCH, Options, switched_off
from ddp_crossover.own_threads import forget_threads, is_own_thread

if TYPE_CHECKING:
    from ddp_crossover.addons.lease.client import GpuLease


class Attachment:
    """The parts of one model, and their end.

    Args:
        ddp: the model.
        optimizers: its optimizers.
        options: what the user asked for.
        process_group: process group for our traffic, or None for one of our own.
        lease: with which jobs share the device, or None.

    Attributes:
        parts: all parts.
        is_ended: whether DDP trains as it was before attach.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        options: Options,
        *,
        process_group: dist.ProcessGroup | None,
        lease: GpuLease | None,
    ) -> None:
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(f"process_group must be what torch.distributed.new_group() returns, got {process_group!r}")
        self._is_switched_off = switched_off()
        self.is_ended = False
        self._left_because: str | None = None
        self._is_in_child = False
        self._after_leaving: Callable[[], object] = lambda: None
        self.parts = parts = compose(
            ddp,
            optimizers,
            Options(schedule=Schedule.ALLREDUCE) if self._is_switched_off else options,
            process_group=process_group,
            lease=lease,
            on_leave=_weakly(weakref.WeakMethod(self._leave)),
        )
        # End when the DDP object is dropped, not the user's state: a variable may hold the state while the network is
        # wrapped and attached again.
        self._when_model_is_dropped: weakref.finalize[..., object] = weakref.finalize(ddp, self._model_is_dropped)
        self._when_model_is_dropped.atexit = False  # code that runs at exit still gets pending updates and gradients
        # These run at the end of the program.
        self._finalizers: list[weakref.finalize[..., object]] = [
            weakref.finalize(self, parts.link.shut_down),
            weakref.finalize(self, parts.compute_waits.others.release),
            self._when_model_is_dropped,
        ]
        _watch_forks(self)

    def after_leaving(self, function: Callable[[], object]) -> None:
        """Call ``function()`` when DDP is left as it was because nothing can be gained."""
        self._after_leaving = function

    def progress(self) -> str:
        """Return one line about what is being measured or tried now, or what was found and what it gains."""
        if self._is_switched_off:
            return f"{SWITCH}=off in the environment: the model trains as plain DDP does"
        if self.is_ended:
            return self._left_because or "detached: the model trains as plain DDP does"
        return self.parts.plain_reason or self.parts.planning.progress()

    def consolidate(self, to: int | None = None) -> None:
        """Put the optimizers' state together on one rank, or on all. Every rank must call it."""
        world_size = self.parts.link.world_size
        if to is not None and not 0 <= to < world_size:
            raise ValueError(f"to={to}: the model has ranks 0 to {world_size - 1} in its process group")
        if not self.is_ended:
            self.parts.updates.consolidate(range(world_size) if to is None else (to,))

    def end(self) -> None:
        """Apply what is pending and remove all hooks. Every rank must call it."""
        self.consolidate()
        try:
            self._end_alone()
        finally:
            if not self._is_in_child:
                # Also if this rank's model was dropped before, as other ranks may not have found theirs yet.
                self.parts.link.close()

    def _end_alone(self) -> None:
        """End it without the other ranks."""
        if self.is_ended:
            return
        self.is_ended = True
        try:
            self.parts.reducer.detach()
        finally:
            if self.parts.turn_points is not None:
                self.parts.moments.leave(self.parts.turn_points)
            self.parts.compute_waits.others.release()
            self.parts.link.shut_down()
        self._when_model_is_dropped.detach()  # it keeps this object alive, and a model may be attached many times

    def _leave(self, sentence: str) -> None:
        """End it because nothing can be gained. Every rank does, at its next forward."""
        self._left_because = sentence
        # If plans have settled, the planner has said it.
        self.parts.fallbacks.note(self._left_because, is_said=self.parts.planning.settled)
        self.end()
        self._after_leaving()

    def _model_is_dropped(self) -> None:
        """End it when the DDP object is collected: its network may stay in use, or be wrapped again."""
        if is_own_thread():
            # The garbage collector runs on a thread of the link, which must not wait for legs that it has to run.
            threading.Thread(target=self._take_apart, name="ddp_crossover-close", daemon=True).start()
        else:
            self._take_apart()

    def _take_apart(self) -> None:
        self.parts.link.shut_down()  # every leg has succeeded or failed after this, so nothing below waits for peers
        for step in (self.parts.params.use_all, self._end_alone):
            with contextlib.suppress(LegError):
                step()

    # Forks.

    def before_fork(self) -> None:
        """Finish pending updates and gradients, because a forked child has none of our threads; take the lock."""
        self.parts.params.lock.acquire()
        self.parts.params.use_all()
        self.parts.plan_in_force.deliver_gradients()

    def after_fork_in_parent(self) -> None:
        """Release the lock that :meth:`before_fork` has taken."""
        self.parts.params.lock.release()

    def after_fork_in_child(self) -> None:
        """Leave a plain model in the child: without hooks, and without finalizers, which need the parent's threads."""
        self.parts.params.lock.release()
        for finalizer in self._finalizers:
            finalizer.detach()
        self._is_in_child = True
        if self.is_ended:
            return
        self.parts.plan_in_force.finish_gradients_in_child()
        self.parts.reducer.become_plain()
        if self.parts.turn_points is not None:
            self.parts.moments.leave(self.parts.turn_points)
        self.is_ended = True


_watched: weakref.WeakSet[Attachment] = weakref.WeakSet()
_forking: list[Attachment] = []
_is_registered = False


def _watch_forks(one: Attachment) -> None:
    """Tell ``one`` of each ``os.fork()`` of this process, as long as it lives."""
    global _is_registered
    if not _is_registered:  # Python cannot unregister these functions
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
        _is_registered = True
    _watched.add(one)


def _before() -> None:
    for one in list(_watched):
        _forking.append(one)
        one.before_fork()


def _in_parent() -> None:
    while _forking:
        _forking.pop().after_fork_in_parent()


def _in_child() -> None:
    # What is garbage now, such as the process group of a model that was attached earlier, would wait in its destructor
    # for threads that the child does not have. Nothing that the parent has made is collected from now on.
    gc.freeze()
    forget_threads()
    _watched.clear()
    while _forking:
        _forking.pop().after_fork_in_child()


def _weakly(method: weakref.WeakMethod[Callable[[str], None]]) -> Callable[[str], None]:
    """Call the method while its object is there: a cycle of references would keep the model's memory for long."""

    def call(why: str) -> None:
        if (bound := method()) is not None:
            bound(why)

    return call
