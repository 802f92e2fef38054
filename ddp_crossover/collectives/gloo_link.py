"""Legs over gloo, by direct exchange between peers.

Gloo's own reduce-scatter sends twice the bytes, and its all-gather cannot be started automatically when a reduction
is done. Instead each rank sends every peer that peer's slice, adds the slices it receives *in rank order* (so the sum
does not depend on which arrives first), and sends its reduced slice to all peers. All receives of a group are posted
before its sends: announcing a receive behind data on the same connection halves the throughput of that connection.

No method that the training thread calls takes a lock that another thread needs: a signal handler may interrupt the
training thread inside such a method and wait for a leg.

Gloo's calls block, so they run on threads: one stages and posts (in the order that ``gloo_posting`` decides), one
adds up, and a few wait for gather legs. The training thread waits on Python events only, so Ctrl-C reaches it.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ddp_crossover.collectives.gloo_legs import GlooGatherLeg, GlooLeg, GlooScatterLeg, Latch
from ddp_crossover.collectives.gloo_posting import Pace, PostQueue
from ddp_crossover.collectives.leg import LegError, ScatterLeg
from ddp_crossover.collectives.link import MAX_GROUPS, Link
from ddp_crossover.collectives.rank_order_sum import ScratchPool, add_in_rank_order
from ddp_crossover.collectives.socket_backlog import SocketBacklog
from ddp_crossover.collectives.waiters import Waiters
from ddp_crossover.own_threads import is_own_thread, start_thread
from ddp_crossover.tracing.clock import CommClock

_ITERATION_TAGS = 2**14  # 14 bits of iteration, 1 of leg, 16 of group: a gloo tag has 31.
_SMALL_GROUP = MAX_GROUPS
# Ranks post gather legs in different orders, so legs that a peer has not posted yet pile up here.
_MAX_GATHER_WAITS = 64
_SHUT_DOWN_LOOK_S = 1e-3
_ABORT = timedelta(milliseconds=1)


class _Message(NamedTuple):
    peer: int
    tensor: Tensor


class GlooLink(Link):
    """Peer exchange of CPU tensors."""

    orders_gathers = True
    has_fused_all_reduce = False

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, backlog: SocketBacklog) -> None:
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.sent_bytes = 0
        self.clock = CommClock()
        self.iteration = 0
        self.process_group = process_group
        self._peers = [rank for rank in range(self.world_size) if rank != self.rank]
        self._scratch = ScratchPool()
        self._small_exchanges = 0
        self._expected: dict[int, GlooScatterLeg] = {}
        self._queue = PostQueue(Pace(backlog))
        self._open: set[GlooLeg] = set()  # legs that were started and have not ended
        self._staging: deque[Callable[[], None]] = deque()
        self._failures: list[LegError] = []
        self._to_reduce: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiters = Waiters(_MAX_GATHER_WAITS)
        self._threads = [start_thread("post", self._post_forever), start_thread("reduce", self._reduce_forever)]

    def next_iteration(self) -> None:
        self.iteration += 1
        self._queue.pace.is_relaxed = False

    def all_scattered(self) -> None:
        self._queue.pace.is_relaxed = True

    def expect(self, group: int, buffer: Tensor) -> None:
        self._raise_failure()
        leg = self._expected[group] = GlooScatterLeg(self, group, buffer)
        leg.expected = True
        self._queue.put(lambda: self._post_receives(leg))

    def reduce_scatter(self, group: int, buffer: Tensor) -> GlooScatterLeg:
        leg = self._expected.pop(group, None)
        if leg is None or leg.iteration != self.iteration:
            leg = GlooScatterLeg(self, group, buffer)
        assert leg.buffer is buffer
        return self._start_scatter(leg)

    def all_gather(self, scatter: ScatterLeg, urgency: int | None = None) -> GlooGatherLeg:
        return self._start_gather(GlooGatherLeg(self, cast(GlooScatterLeg, scatter), urgency))

    def soon(self, job: Callable[[], None]) -> None:
        self._raise_failure()
        # append() is atomic; a separate count of jobs would stay wrong if a signal handler raised in between.
        self._staging.append(job)
        self._queue.put(self._stage)

    def forget_sizes(self) -> None:
        self._scratch.clear()

    def finish_jobs(self) -> None:
        if self._staging and not self.is_closed:
            finished = Latch()

            def finish() -> None:
                self._stage()
                finished.set()

            self._queue.put(finish)
            finished.wait()

    def set_pace(self, s_per_byte: float) -> None:
        self._queue.pace.s_per_byte = s_per_byte

    def all_reduce(self, group: int, buffer: Tensor) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        scatter = self.reduce_scatter(group, buffer)
        gather = GlooGatherLeg(self, scatter, urgency=group, paced=False)

        def complete(error: BaseException | None) -> None:
            if error is None:
                future.set_result(buffer)
            else:
                future.set_exception(self.describe(gather.label, error))  # type: ignore[arg-type]

        gather.on_done = complete
        self._start_gather(gather)
        return future

    def all_gather_small(self, value: Tensor) -> Tensor:
        rows = value.new_empty((self.world_size, *value.shape))
        rows[self.rank] = value
        leg = GlooLeg(self, "exchange of norms")
        self._small_exchanges += 1
        tag = self._tag(self._small_exchanges, leg=0, group=_SMALL_GROUP)

        def exchange() -> None:
            try:
                receives = self._receive([_Message(peer, rows[peer]) for peer in self._peers], tag)
                sends = self._send([_Message(peer, rows[self.rank]) for peer in self._peers], tag)
            except Exception as error:
                leg.finish(error)
                return
            # Finish on the reducing thread: the waiting threads may all be blocked by gather legs.
            self._to_reduce.put(lambda: self._finish(leg, [*receives, *sends]))

        self._raise_failure()
        self._queue.put_urgent(exchange)
        self._note_open(leg)
        leg.wait()
        return rows

    def shut_down(self) -> None:
        if not is_own_thread():  # else DearState closes the link from another thread: a thread cannot join itself
            self.close()

    def close(self) -> None:
        """Wait for open legs (up to the group's timeout), join the threads, release the process group.

        Open legs are completed because ranks still wait for each other's slices, even if backward failed on all ranks.
        """
        if self.is_closed:
            return
        try:
            while self._open and not self._failures and not self.gave_up:
                time.sleep(_SHUT_DOWN_LOOK_S)
        finally:
            self._close_now()

    def _close_now(self) -> None:
        """Close without waiting for legs: those that are still open fail."""
        self.is_closed = True
        if self._failures or self._open:
            self._abort()
        # Always join all threads: one that returns from gloo after the interpreter is gone ends the process by SIGABRT.
        self._to_reduce.put(None)
        self._queue.close()
        for thread in [*self._threads, *self._waiters.close()]:
            thread.join()
        for leg in list(self._open):
            leg.finish(self._failures[0])
        self._scratch.clear()
        self._expected.clear()
        super().close()

    def _abort(self) -> None:
        """End all waits in gloo on this rank and its peers: a timed-out receive closes all connections of its group."""
        self._fail("rest of the legs", RuntimeError("the model was given up first"))
        for peer in self._peers:
            with contextlib.suppress(Exception):  # the timeout, which is intended
                [receive] = self._receive([_Message(peer, torch.empty(1))], self._tag(0, leg=1, group=_SMALL_GROUP))
                receive.wait(_ABORT)

    def leg_is_over(self, leg: GlooLeg) -> None:
        """Forget a leg that has ended, whether it succeeded or failed."""
        self._open.discard(leg)

    def describe(self, label: str, error: BaseException) -> LegError:
        if isinstance(error, LegError):
            return error
        return LegError(
            f"rank {self.rank}: the {label} failed: {error}. A peer has probably died or stopped "
            "answering; this process' gradients are incomplete, so end it and restart the job from a checkpoint"
        )

    # Called by the training thread: hand legs over to the posting thread.

    def _start_scatter(self, leg: GlooScatterLeg) -> GlooScatterLeg:
        self._raise_failure()
        leg.times = self.clock.leg_started("scatter", leg.group)
        self._queue.put(lambda: self._post_scatter(leg))
        self._note_open(leg)
        return leg

    def _start_gather(self, leg: GlooGatherLeg) -> GlooGatherLeg:
        self._raise_failure()
        leg.times = self.clock.leg_started("gather", leg.group)
        self._queue.put_gather(leg)
        self._note_open(leg)
        return leg

    def _note_open(self, leg: GlooLeg) -> None:
        # Called after the leg was queued: a signal handler may raise at any line, and a leg that is noted as open but
        # was never queued would never end.
        self._open.add(leg)
        if leg.is_done():
            self._open.discard(leg)

    def _raise_failure(self) -> None:
        """Raise the first failure, so that later legs fail at once and not each after its own timeout."""
        if self._failures:
            raise self._failures[0]
        if self.is_closed:
            raise RuntimeError("the communication threads of this DearState have been closed")

    # Thread 1 stages gradients and posts legs.

    def _post_forever(self) -> None:
        while (task := self._queue.next()) is not None:
            if isinstance(task, GlooGatherLeg):
                self._post_gather(task)
            else:
                task()
            del task  # else a finished leg and its buffer stay alive until the next task

    def _stage(self) -> None:
        while self._staging:
            try:
                self._staging[0]()
            except Exception as error:
                self._fail("staging of gradients", error)
            finally:
                self._staging.popleft()

    def _post_receives(self, leg: GlooScatterLeg) -> None:
        try:
            self._raise_failure()
            leg.incoming = [self._scratch.take(leg.shard()) for _ in self._peers]
            leg.scatter_receives = self._receive(
                [_Message(*pair) for pair in zip(self._peers, leg.incoming, strict=True)],
                self._tag(leg.iteration, 0, leg.group),
            )
        except Exception as error:
            self._fail(leg.label, error)

    def _post_scatter(self, leg: GlooScatterLeg) -> None:
        if not leg.expected:
            self._post_receives(leg)
        try:
            self._raise_failure()
            with record_function(f"ddp_crossover::reduce_scatter[{leg.group}]"):
                leg.before_posting()
                # Safe before our sends: a peer sends its reduced slice only after it has received our slice.
                leg.gather_receives = self._receive(
                    [_Message(peer, leg.slice_of(peer)) for peer in self._peers],
                    self._tag(leg.iteration, 1, leg.group),
                )
                self.clock.leg_posted(leg.times)
                leg.sends = self._send(
                    [_Message(peer, leg.slice_of(peer)) for peer in self._peers],
                    self._tag(leg.iteration, 0, leg.group),
                )
        except Exception as error:
            self._end(leg, error)
        else:
            self._to_reduce.put(lambda: self._reduce(leg))

    def _post_gather(self, leg: GlooGatherLeg) -> None:
        scatter = leg.scatter
        try:
            scatter.wait()  # already done; raises the scatter leg's error, if any
            with record_function(f"ddp_crossover::all_gather[{scatter.group}]"):
                self.clock.leg_posted(leg.times)
                scatter.sends += self._send(
                    [_Message(peer, scatter.shard()) for peer in self._peers],
                    self._tag(scatter.iteration, 1, scatter.group),
                )
        except Exception as error:
            self._end(leg, error)
        else:
            self._waiters.run(lambda: self._complete_gather(leg))

    def _tag(self, iteration: int, leg: int, group: int) -> int:
        return (iteration % _ITERATION_TAGS) << 17 | leg << 16 | group

    def _receive(self, messages: list[_Message], tag: int) -> list[dist.Work]:
        return [
            cast(
                dist.Work,
                dist.irecv(m.tensor, group=self.process_group, group_src=m.peer, tag=tag),
            )
            for m in messages
            if m.tensor.numel()
        ]

    def _send(self, messages: list[_Message], tag: int) -> list[dist.Work]:
        messages = [m for m in messages if m.tensor.numel()]
        self.sent_bytes += sum(m.tensor.nbytes for m in messages)
        return [
            cast(
                dist.Work,
                dist.isend(m.tensor, group=self.process_group, group_dst=m.peer, tag=tag),
            )
            for m in messages
        ]

    # Thread 2 adds up the received slices.

    def _reduce_forever(self) -> None:
        while (job := self._to_reduce.get()) is not None:
            job()
            del job  # else a finished leg and its buffer stay alive until the next job

    def _reduce(self, leg: GlooScatterLeg) -> None:
        try:
            self._raise_failure()
            for receive in leg.scatter_receives:
                receive.wait()
            add_in_rank_order(leg.shard(), self.rank, leg.incoming, in_fp32=self.sums_in_fp32)
            self._scratch.give_back(leg.incoming)
            leg.incoming = []
        except Exception as error:
            self._end(leg, error)
        else:
            self._end(leg, None)

    # The other threads wait for gather legs.

    def _complete_gather(self, leg: GlooGatherLeg) -> None:
        try:
            self._raise_failure()
            for receive in leg.scatter.gather_receives:
                receive.wait()
            # After this leg the caller may write into the buffer: scale it, step in place, stage new gradients.
            for send in leg.scatter.sends:
                send.wait()
            self.after_gather(leg)
        except Exception as error:
            self._end(leg, error)
        else:
            self._end(leg, None)

    def _finish(self, leg: GlooLeg, works: list[dist.Work]) -> None:
        try:
            for work in works:
                work.wait()
        except Exception as error:
            leg.finish(error)
        else:
            leg.finish()

    def after_gather(self, leg: GlooGatherLeg) -> None:
        """Copy the gathered buffer to where it is needed; runs on the thread that waited for the leg."""

    def _end(self, leg: GlooLeg, error: BaseException | None) -> None:
        """End a leg: wake its waiters, and let the posting thread check whether a gather leg became ready."""
        self.clock.leg_ended(leg.times)
        leg.finish(None if error is None else self._fail(leg.label, error))
        self._queue.look_again()

    def _fail(self, label: str, error: BaseException) -> LegError:
        """Record a failure; returns the first one, with which every other leg fails as well."""
        self._failures.append(self.describe(label, error))
        self._queue.stop_pacing()
        return self._failures[0]
