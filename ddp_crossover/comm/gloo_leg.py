"""Legs over gloo: what they have in common, the reduce-scatter and the all-gather of a fusion group.

Each stage of a leg is a method, which says on which thread it runs.

[Note: legs over gloo]
Gloo's own reduce-scatter sends twice the bytes, and its all-gather cannot be started automatically when a reduction
is done. Instead each rank sends every peer that peer's slice, adds the slices it receives *in rank order* (so the sum
does not depend on which arrives first), and sends its reduced slice to all peers. All receives of a group are posted
before its sends: announcing a receive behind data on the same connection halves the throughput of that connection.

    training thread   start():  hand the leg over to the posting thread
    posting thread    post():   post the leg's messages
    reducing thread   _reduce():    wait for the peers' slices and add them up, which ends a scatter leg
    waiting thread    _complete():  wait for the reduced slices, which ends a gather leg

With nodes each leg has two rounds. Between them, ``_post_again()`` posts the second one's sends on the posting thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ddp_crossover.comm.fusion_buffer import FusionBuffer, Memory
from ddp_crossover.comm.gloo_messages import (
    Message,
    MessageKind,
    PeerMessages,
    message_tag,
)
from ddp_crossover.comm.gloo_threads import GlooThreads
from ddp_crossover.comm.leg import Failures, HostWait, Latch, Leg, ScatterLeg
from ddp_crossover.comm.meter import LinkMeter
from ddp_crossover.comm.nodes import Nodes
from ddp_crossover.comm.rounds import rounds_of
from ddp_crossover.comm.sums import ScratchPool
from ddp_crossover.own_threads import refuse_to_wait
from ddp_crossover.report.clock import LegTimes
from ddp_crossover.torch_internals.profiling import named_range


@dataclass(eq=False)
class GlooCommContext:
    """Communication state that all legs of one link share.

    Attributes:
        messages: sends and receives slices.
        threads: runs the stages of the legs.
        failures: the first failure, with which every later leg fails.
        meter: measures the legs.
        nodes: where the ranks are.
        scratch: memory for the peers' slices.
        sums_in_fp32: whether 16-bit buffers are added up in fp32 and rounded once.
        open_legs: legs that were started and have not ended.
        wait_was_interrupted: whether an exception, such as KeyboardInterrupt, ended the last wait for a leg.
    """

    messages: PeerMessages
    threads: GlooThreads
    failures: Failures
    meter: LinkMeter
    nodes: Nodes
    sums_in_fp32: bool = False
    scratch: ScratchPool = field(default_factory=ScratchPool)
    open_legs: set[GlooLeg] = field(default_factory=set)
    wait_was_interrupted: bool = False

    def use_nodes(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def begin_wait(self) -> None:
        """Note a wait for a leg; if an exception ends it, it stays noted."""
        self.wait_was_interrupted = True

    def end_wait(self) -> None:
        self.wait_was_interrupted = False


class GlooLeg(Leg):
    """A leg whose end other threads report through a :class:`Latch`.

    Attributes:
        ended: set when it has ended.
    """

    group = -1
    is_gather = False
    times: LegTimes

    def __init__(self, context: GlooCommContext, label: str) -> None:
        self.label = label
        self._context = context
        self.ended = Latch()
        self._ended_s = 0.0
        self._error: BaseException | None = None

    def wait(self, host_wait: HostWait | None = None) -> None:
        context = self._context
        if not self.ended.is_set:
            refuse_to_wait()
            start_s = time.perf_counter()
            context.begin_wait()
            while not self.ended.wait(-1 if host_wait is None else host_wait.poll()):
                pass
            context.end_wait()
            context.meter.clock.waited(start_s, self.label, self.group, for_gather=self.is_gather)
        if host_wait is not None:
            host_wait.arrived(self._ended_s)
        if self._error is not None:
            raise context.failures.describe(self.label, self._error) from self._error

    def is_done(self) -> bool:
        return self.ended.is_set

    def finish(self, error: BaseException | None = None) -> None:
        """End the leg and wake its waiters; with an ``error``, their waits raise."""
        self._error = error
        self._ended_s = time.perf_counter()
        self.ended.set()
        self._context.open_legs.discard(self)

    def _note_open(self) -> None:
        # Called after the leg was queued: a signal handler may raise at any line, and a leg that is noted as open but
        # was never queued would never end.
        open_legs = self._context.open_legs
        open_legs.add(self)
        if self.ended.is_set:
            open_legs.discard(self)

    def _end(self, error: BaseException | None) -> None:
        """Finish the leg. Runs on whichever thread has run its last stage."""
        context = self._context
        context.meter.clock.leg_ended(self.times)
        self.finish(None if error is None else context.failures.record(self.label, error))


SCATTER_KINDS = (MessageKind.SCATTER, MessageKind.SCATTER_AGAIN)
GATHER_KINDS = (MessageKind.GATHER, MessageKind.GATHER_AGAIN)


class GlooScatterLeg(GlooLeg, ScatterLeg):
    """A reduce-scatter, and the receives of the all-gather that will follow it.

    Attributes:
        is_announced: whether ``Link.announce`` announced it; its receives are then posted earlier than its sends.
        memory: the memory of both legs.
        rounds: their rounds.
        gather_receives: receives of each round of the gather leg.
        sends: sends from the buffer, of both legs, which end before it is written to again.
    """

    is_announced = False

    def __init__(self, context: GlooCommContext, iteration: int, group: int, buffer: FusionBuffer) -> None:
        super().__init__(context, f"scatter leg of fusion group {group}")
        self.iteration = iteration
        self.group = group
        self.memory = Memory(buffer)
        self.rounds = rounds_of(self.memory, context.nodes, context.scratch, sums_in_fp32=context.sums_in_fp32)
        self.gather_receives: list[list[Message]] = []
        self.sends: list[Message] = []
        self._receives: list[list[Message]] = []

    def shards(self) -> list[Tensor]:
        messages = self._context.messages
        return self.memory.buffer.slices(self._context.nodes.shard_of[messages.rank], messages.world_size)

    def start(self) -> None:
        """Queue the leg for the posting thread. Runs on the training thread."""
        context = self._context
        context.failures.check()
        self.times = context.meter.clock.leg_started("scatter", self.group)
        context.threads.posting.put(self.post)
        self._note_open()

    def post_receives(self) -> None:
        """Post the receives of the first round. Runs on the posting thread."""
        try:
            self._context.failures.check()
            self._receives = [self._post_receives_of(0)]
        except Exception as error:
            self._context.failures.record(self.label, error)

    def post(self) -> None:
        """Post the other receives of both legs and the sends of the first round. Runs on the posting thread."""
        if not self.is_announced:
            self.post_receives()
        context = self._context
        try:
            context.failures.check()
            with named_range(f"ddp_crossover::reduce_scatter[{self.group}]"):
                self.before_posting()
                # Safe before our sends: a peer sends its reduced slice only after it has received our slice.
                self._receives += [self._post_receives_of(number) for number in range(1, len(self.rounds.scatter))]
                self.gather_receives = [
                    context.messages.receive(one.receives(), message_tag(kind, self.iteration, self.group))
                    for kind, one in zip(GATHER_KINDS, self.rounds.gather, strict=False)
                ]
                slices = self.rounds.scatter[0].sends()
                context.meter.clock.leg_posted(self.times)
                self.sends = context.messages.send(slices, message_tag(SCATTER_KINDS[0], self.iteration, self.group))
        except Exception as error:
            self._end(error)
        else:
            context.threads.reduce(self._reduce)

    def before_posting(self) -> None:
        """Make the buffer ready to be sent. Runs on the posting thread."""

    def _post_receives_of(self, number: int) -> list[Message]:
        tag = message_tag(SCATTER_KINDS[number], self.iteration, self.group)
        return self._context.messages.receive(self.rounds.scatter[number].receives(), tag)

    def _post_again(self) -> None:
        """Post the sends of the second round. Runs on the posting thread."""
        context = self._context
        try:
            context.failures.check()
            tag = message_tag(SCATTER_KINDS[1], self.iteration, self.group)
            with named_range(f"ddp_crossover::reduce_scatter[{self.group}]"):
                self.sends += context.messages.send(self.rounds.scatter[1].sends(), tag)
        except Exception as error:
            self._end(error)
        else:
            context.threads.reduce(lambda: self._reduce(1), 1)

    def _reduce(self, number: int = 0) -> None:
        """Finish a round. Runs on the reducing thread of that round."""
        context = self._context
        try:
            context.failures.check()
            # A peer sends the first slices as soon as its own backward has come so far, the next when its node has.
            context.messages.wait(self._receives[number], self.label, is_proof=number == 0)
            self.rounds.scatter[number].finish()
        except Exception as error:
            self._end(error)
            return
        if number + 1 < len(self.rounds.scatter):
            context.threads.posting.put(self._post_again)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        super()._end(error)
        self._context.threads.posting.note_ready(self.ended)


class AnnouncedLegs:
    """Scatter legs whose receives were posted before the legs are started, so that faster peers can send already.

    Args:
        context: what all legs of the link share.

    Attributes:
        legs: the announced legs, by group.
    """

    def __init__(self, context: GlooCommContext) -> None:
        self.legs: dict[int, GlooScatterLeg] = {}
        self._context = context

    def post(self, iteration: int, group: int, buffer: FusionBuffer) -> None:
        self._context.failures.check()
        leg = self.legs[group] = GlooScatterLeg(self._context, iteration, group, buffer)
        leg.is_announced = True
        self._context.threads.posting.put(leg.post_receives)

    def take(self, group: int, iteration: int) -> GlooScatterLeg | None:
        """Remove and return the group's leg; None if it was not announced in this iteration."""
        leg = self.legs.pop(group, None)
        return leg if leg is not None and leg.iteration == iteration else None


class GlooGatherLeg(GlooLeg):
    """An all-gather, posted when its scatter leg is done, or later. It ends when our sends from the buffer have ended.

    Args:
        context: what all legs of the link share.
        scatter: the scatter leg of the same group.
        urgency: of the legs that are ready, the one with the smallest urgency is posted first; None keeps the order
            of the calls.
        paced: whether to post it only when the link has almost nothing left to send; only for legs with an urgency.
        on_done: called when the leg has ended, with its error if it has failed.
    """

    is_gather = True

    def __init__(
        self,
        context: GlooCommContext,
        scatter: GlooScatterLeg,
        urgency: int | None = None,
        *,
        paced: bool = True,
        on_done: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        super().__init__(context, f"gather leg of fusion group {scatter.group}")
        self.scatter = scatter
        self.ready = scatter.ended
        self.urgency = urgency
        self.paced = paced
        self.group = scatter.group
        self._on_done = on_done

    def start(self) -> None:
        """Queue the leg for the posting thread. Runs on the training thread."""
        context = self._context
        context.failures.check()
        self.times = context.meter.clock.leg_started("gather", self.group)
        context.threads.posting.put_gather(self)
        self._note_open()

    def post(self) -> None:
        """Send our reduced slice to all peers, or with nodes those of the first round. Runs on the posting thread."""
        try:
            self.scatter.wait()  # already done; raises the scatter leg's error, if any
            self._context.meter.clock.leg_posted(self.times)
            self._post_sends_of(0)
        except Exception as error:
            self._end(error)
        else:
            self._context.threads.wait(self._complete)

    def _post_sends_of(self, number: int) -> None:
        scatter = self.scatter
        tag = message_tag(GATHER_KINDS[number], scatter.iteration, self.group)
        with named_range(f"ddp_crossover::all_gather[{self.group}]"):
            scatter.sends.extend(self._context.messages.send(scatter.rounds.gather[number].sends(), tag))

    def _post_again(self) -> None:
        """Send what the first round has brought. Runs on the posting thread."""
        try:
            self._post_sends_of(1)
        except Exception as error:
            self._end(error)
        else:
            self._context.threads.wait(lambda: self._complete(1), 1)

    def _complete(self, number: int = 0) -> None:
        """Wait for the peers' slices of a round, in the end for our sends. Runs on a waiting thread of its own."""
        context, scatter = self._context, self.scatter
        try:
            context.failures.check()
            context.messages.wait(scatter.gather_receives[number], self.label)
            scatter.rounds.gather[number].finish()
            if number + 1 < len(scatter.rounds.gather):
                context.threads.posting.put(self._post_again)
                return
            # After this leg the caller may write into the buffer: scale it, step in place, stage new gradients.
            context.messages.wait(scatter.sends, self.label)
            scatter.rounds.release()
            self.after_receiving()
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def after_receiving(self) -> None:
        """Copy the gathered buffer to where it is needed. Runs on a waiting thread."""

    def finish(self, error: BaseException | None = None) -> None:
        super().finish(error)
        if self._on_done is not None:
            self._on_done(error)
            self._on_done = None  # close() may finish a leg again if a signal handler interrupted its start
