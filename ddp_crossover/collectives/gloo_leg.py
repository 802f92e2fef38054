"""What all legs over gloo have in common. Each stage of a leg is a method, which says on which thread it runs.

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
from dataclasses import dataclass, field

from ddp_crossover.collectives.gloo_failures import Failures
from ddp_crossover.collectives.gloo_messages import PeerMessages
from ddp_crossover.collectives.gloo_threads import GlooThreads
from ddp_crossover.collectives.latch import Latch
from ddp_crossover.collectives.leg import HostWait, Leg
from ddp_crossover.collectives.meter import LinkMeter
from ddp_crossover.collectives.nodes import Nodes
from ddp_crossover.collectives.rank_order_sum import ScratchPool
from ddp_crossover.own_threads import refuse_to_wait
from ddp_crossover.tracing.clock import LegTimes


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
        """Share slices among these nodes from now on."""
        self.nodes = nodes

    def begin_wait(self) -> None:
        """Note a wait for a leg; if an exception ends it, it stays noted."""
        self.wait_was_interrupted = True

    def end_wait(self) -> None:
        """Note that it has ended as it should."""
        self.wait_was_interrupted = False


class GlooLeg(Leg):
    """A leg whose end other threads report through a :class:`Latch`."""

    group = -1
    is_gather = False
    times: LegTimes

    def __init__(self, context: GlooCommContext, label: str) -> None:
        self.label = label
        self._context = context
        self._done = Latch()
        self._error: BaseException | None = None

    def wait(self, host_wait: HostWait | None = None) -> None:
        context = self._context
        if not self._done.is_set:
            refuse_to_wait()
            start_s = time.perf_counter()
            context.begin_wait()
            while not self._done.wait(-1 if host_wait is None else host_wait.poll()):
                pass
            context.end_wait()
            context.meter.clock.waited(start_s, self.label, self.group, for_gather=self.is_gather)
        if self._error is not None:
            raise context.failures.describe(self.label, self._error) from self._error

    def is_done(self) -> bool:
        return self._done.is_set

    def finish(self, error: BaseException | None = None) -> None:
        """End the leg and wake its waiters; with an ``error``, their waits raise."""
        self._error = error
        self._done.set()
        self._context.open_legs.discard(self)

    def _note_open(self) -> None:
        # Called after the leg was queued: a signal handler may raise at any line, and a leg that is noted as open but
        # was never queued would never end.
        open_legs = self._context.open_legs
        open_legs.add(self)
        if self._done.is_set:
            open_legs.discard(self)

    def _end(self, error: BaseException | None) -> None:
        """Finish the leg. Runs on whichever thread has run its last stage."""
        context = self._context
        context.meter.clock.leg_ended(self.times)
        self.finish(None if error is None else context.failures.record(self.label, error))
