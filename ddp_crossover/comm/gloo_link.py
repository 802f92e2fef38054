"""The links over gloo: start legs, and end them all. ``gloo_leg`` says what a leg does.

No method that the training thread calls takes a lock that another thread needs: a signal handler may interrupt the
training thread inside such a method and wait for a leg.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.gloo_leg import (
    AnnouncedLegs,
    GlooCommContext,
    GlooGatherLeg,
    GlooScatterLeg,
)
from ddp_crossover.comm.gloo_messages import Connection, LatePeers, PeerMessages
from ddp_crossover.comm.gloo_small_gather import GlooSmallGather
from ddp_crossover.comm.gloo_threads import GlooThreads, StagingQueue
from ddp_crossover.comm.leg import Failures, ScatterLeg
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.nodes import Nodes
from ddp_crossover.comm.pace import SocketBacklog
from ddp_crossover.own_threads import is_own_thread, start_thread
from ddp_crossover.torch_internals.ddp import process_group_timeout

_CLOSE_POLL_S = 1e-3


class PeerLink(Link):
    """The part of the links over gloo that does not depend on the device of the buffers.

    Args:
        connections: process groups for the legs, over the same ranks.
        device: device of the gradients.
        backlog: backlog of the connections' sockets.
        sums_in_fp32: whether 16-bit buffers are added up in fp32 and rounded once.
    """

    adds_in_rank_order = True

    def __init__(
        self,
        connections: Sequence[Connection],
        device: torch.device,
        backlog: SocketBacklog,
        *,
        sums_in_fp32: bool = False,
    ) -> None:
        process_group = connections[0].ascending
        super().__init__(process_group)
        threads = GlooThreads(backlog)
        failures = Failures(self.rank, on_failure=threads.posting.stop_pacing)
        messages = PeerMessages(connections, self.meter)
        self.pace = threads.posting.pace
        self._context = GlooCommContext(messages, threads, failures, self.meter, self.nodes, sums_in_fp32)
        self._small_gathers = 0
        self._late_peers = LatePeers(
            dist.get_process_group_ranks(process_group),
            self.rank,
            process_group_timeout(process_group, device).total_seconds(),
            messages.awaited,
        )
        self._late_peers_thread = start_thread("late", self._late_peers.watch)

    def all_gather_small(self, value: Tensor) -> Tensor:
        self._small_gathers += 1
        leg = GlooSmallGather(self._context, self._small_gathers, value)
        leg.start()
        leg.wait()
        return leg.rows

    def exchange_numbers(self, value: int) -> Callable[[], list[int]]:
        self._small_gathers += 1
        number = torch.tensor([value], device="cpu")
        leg = GlooSmallGather(self._context, self._small_gathers, number, "agreement about gradients")
        leg.start()

        def wait() -> list[int]:
            leg.wait()
            return cast(list[int], leg.rows.view(-1).tolist())

        return wait

    def use_nodes(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._context.use_nodes(nodes)
        if nodes.are_several:
            self._context.threads.add_round()

    def use_arenas(self, arenas: Collection[Tensor]) -> None:
        super().use_arenas(arenas)
        self._context.scratch.clear()

    def shut_down(self) -> None:
        """Wait for open legs (up to the group's timeout), and join the threads.

        Open legs are completed because ranks still wait for each other's slices, even if backward failed on all ranks.
        """
        if is_own_thread():
            return  # DearState ends the link from another thread: a thread cannot join itself
        context = self._context
        try:
            while not self.is_closed and self._awaits_legs(context):
                time.sleep(_CLOSE_POLL_S)
        finally:
            if not self.is_closed:
                self._end_now()
            super().shut_down()

    @staticmethod
    def _awaits_legs(context: GlooCommContext) -> bool:
        """Whether there are open legs, which may still succeed."""
        return bool(context.open_legs) and context.failures.first is None and not context.wait_was_interrupted

    def _end_now(self) -> None:
        """End without waiting for legs: those that are still open fail."""
        context = self._context
        self.is_closed = True
        context.failures.close()
        if context.failures.first is not None or context.open_legs:
            context.failures.record("rest of the legs", _given_up())
            context.messages.abort()
        self._late_peers.close()
        context.threads.join()
        self._late_peers_thread.join()
        for leg in list(context.open_legs):  # also one that another thread has started meanwhile
            leg.finish(context.failures.first or context.failures.record("rest of the legs", _given_up()))
        context.scratch.clear()
        context.messages.close()


def _given_up() -> RuntimeError:
    return RuntimeError("the model was given up first")


class GlooLink(PeerLink):
    """Peer exchange of CPU tensors."""

    takes_parts = True
    early_receives: AnnouncedLegs

    def __init__(
        self,
        connections: Sequence[Connection],
        device: torch.device,
        backlog: SocketBacklog,
        *,
        sums_in_fp32: bool = False,
    ) -> None:
        super().__init__(connections, device, backlog, sums_in_fp32=sums_in_fp32)
        context = self._context
        self.staging = StagingQueue(context.threads.posting.put, context.failures)
        self.early_receives = AnnouncedLegs(context)

    def reduce_scatter(self, group: int, buffer: FusionBuffer, landing: FusionBuffer | None = None) -> GlooScatterLeg:
        leg = self.early_receives.take(group, self.iteration)
        if leg is None:
            leg = GlooScatterLeg(self._context, self.iteration, group, buffer)
        leg.memory.move(buffer, landing)
        leg.start()
        return leg

    def all_gather(self, scatter: ScatterLeg, urgency: int | None = None) -> GlooGatherLeg:
        leg = GlooGatherLeg(self._context, cast(GlooScatterLeg, scatter), urgency)
        leg.start()
        return leg

    def all_reduce(self, group: int, buffer: Tensor) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def complete(error: BaseException | None) -> None:
            if error is None:
                future.set_result(buffer)
            else:
                future.set_exception(error)  # type: ignore[arg-type]

        scatter = self.reduce_scatter(group, FusionBuffer((buffer,)))
        GlooGatherLeg(self._context, scatter, urgency=group, paced=False, on_done=complete).start()
        return future

    def _end_now(self) -> None:
        super()._end_now()
        self.early_receives.legs.clear()
