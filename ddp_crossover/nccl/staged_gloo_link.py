"""Legs of CUDA tensors over gloo, staged through pinned host memory: gloo cannot send or receive CUDA tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ddp_crossover import device as gpu
from ddp_crossover.comm.all_reduce import all_reduce_sum
from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.gloo_leg import GlooCommContext, GlooGatherLeg, GlooScatterLeg
from ddp_crossover.comm.gloo_link import PeerLink
from ddp_crossover.comm.gloo_messages import Connection
from ddp_crossover.comm.leg import HostWait, ScatterLeg
from ddp_crossover.comm.pace import SocketBacklog
from ddp_crossover.comm.stream_order import CudaStreams


class _StagedScatterLeg(GlooScatterLeg):
    """A reduce-scatter of the host copy of a device buffer."""

    def __init__(
        self,
        context: GlooCommContext,
        iteration: int,
        group: int,
        buffer: Tensor,
        host: FusionBuffer,
        copy_stream: gpu.Stream,
    ) -> None:
        super().__init__(context, iteration, group, host)
        self.device_buffer = buffer
        copy_stream.wait_stream(gpu.current_stream(buffer.device))
        with gpu.on_stream(copy_stream):
            host.whole().copy_(buffer, non_blocking=True)
        self._copied = gpu.record(copy_stream, awaited=True)

    def before_posting(self) -> None:
        # Wait for the copy to the host, so that peers do not get a half-copied buffer. Blocks only the posting thread.
        gpu.sleep_until(self._copied)


class _StagedGatherLeg(GlooGatherLeg):
    """An all-gather that ends with the copy back to the device."""

    def __init__(
        self,
        context: GlooCommContext,
        scatter: _StagedScatterLeg,
        urgency: int | None,
        copy_stream: gpu.Stream,
    ) -> None:
        super().__init__(context, scatter, urgency)
        self.device_buffer = scatter.device_buffer
        self.copy_stream = copy_stream
        self._on_device: gpu.Event | None = None

    def wait(self, host_wait: HostWait | None = None) -> None:
        super().wait(host_wait)
        assert self._on_device is not None
        gpu.current_stream(self.device_buffer.device).wait_event(self._on_device)

    def after_receiving(self) -> None:
        with gpu.on_stream(self.copy_stream):
            self.device_buffer.copy_(self.scatter.memory.buffer.whole(), non_blocking=True)
        self._on_device = gpu.record(self.copy_stream)


class StagedGlooLink(PeerLink):
    """Peer exchange of CUDA tensors. The host has to wait for legs, because the CPU moves the bytes.

    Gradients are staged on the caller's stream, which keeps the order. No leg is announced: a leg begins with the copy
    to the host, so its receives are posted with it.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        device: torch.device,
        backlog: SocketBacklog,
        *,
        sums_in_fp32: bool = False,
    ) -> None:
        # First, because it may fail: the base class starts threads.
        self._to_host_stream = gpu.new_stream(device)
        self._to_device_stream = gpu.new_stream(device)
        super().__init__(connections, device, backlog, sums_in_fp32=sums_in_fp32)
        self._host_buffers: dict[int, Tensor] = {}
        self.streams = CudaStreams(device, (self._to_host_stream, self._to_device_stream))

    def reduce_scatter(self, group: int, buffer: FusionBuffer, landing: FusionBuffer | None = None) -> GlooScatterLeg:
        assert landing is None  # shards would have to travel to the device and back
        memory = buffer.whole()
        host = self._host_buffers.get(group)
        if host is None or host.numel() != memory.numel() or host.dtype != memory.dtype:
            host = torch.empty(memory.numel(), dtype=memory.dtype, device="cpu", pin_memory=True)
            self._host_buffers[group] = host
        on_host = FusionBuffer((host,), travel=buffer.travel)
        leg = _StagedScatterLeg(self._context, self.iteration, group, memory, on_host, self._to_host_stream)
        leg.start()
        return leg

    def all_gather(self, scatter: ScatterLeg, urgency: int | None = None) -> GlooGatherLeg:
        assert isinstance(scatter, _StagedScatterLeg)
        leg = _StagedGatherLeg(self._context, scatter, urgency, self._to_device_stream)
        leg.start()
        return leg

    def all_reduce(self, group: int, buffer: Tensor) -> torch.futures.Future[Tensor]:
        self.meter.sent(2 * buffer.nbytes * (self.world_size - 1) // self.world_size)  # as in a ring
        return all_reduce_sum(buffer, self.process_group, self.clock, group)

    def use_arenas(self, arenas: Collection[Tensor]) -> None:
        super().use_arenas(arenas)
        self._host_buffers.clear()

    def all_gather_small(self, value: Tensor) -> Tensor:
        return super().all_gather_small(value.cpu()).to(value.device)
