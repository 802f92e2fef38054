"""The wire where there is no GPU, for a rehearsal: a thread sleeps for each message, then completes it.

Legs behave as on NCCL: they run one after the other, in the order of the calls. So the pipeline, the plans and the
tuner do what they do there, while compute competes with nothing but the processor.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.leg import HostWait, Leg, ScatterLeg
from ddp_crossover.comm.link import Link
from gpu_bench_parts.wire import Wire


class CpuWire(Wire):
    """Sends one message after the other, on a thread of its own."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._messages: queue.SimpleQueue[tuple[float, Callable[[], None], Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="wire", daemon=True).start()

    def send(self, seconds: float, arrive: Callable[[], None], leave: Callable[[], None] = lambda: None) -> None:
        """Occupy the wire for so long; call `leave` before that and `arrive` afterwards, on the wire's thread."""
        self._messages.put((seconds, leave, arrive))

    def all_reduce(self, buffer: Tensor, group: Any = None, async_op: bool = False) -> "_Work | None":
        """In the place of `dist.all_reduce`."""
        work = _Work(buffer)

        def arrive() -> None:
            self.add_twins(buffer)
            work.future.set_result([buffer])

        self.send(self.all_reduce_s(buffer.nbytes), arrive)
        if async_op:
            return work
        work.future.wait()
        return None

    def _send_all(self) -> None:
        while True:
            seconds, leave, arrive = self._messages.get()
            leave()
            time.sleep(seconds)
            arrive()


class _Work:
    """What `dist.all_reduce(async_op=True)` returns, as far as it is used."""

    def __init__(self, buffer: Tensor) -> None:
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Completed when the sum is there."""
        return self.future


class _CpuLeg(ScatterLeg):
    """Either leg."""

    def __init__(self, link: "CpuLink", kind: str, group: int, buffer: FusionBuffer) -> None:
        self.label = f"{kind} leg of fusion group {group}"
        self.group, self.buffer, self.memory = group, buffer, buffer.whole()
        [self.shard] = buffer.slices(link.rank, link.world_size)
        self._kind, self._clock = kind, link.clock
        self._times = link.clock.leg_started(kind, group)
        self._done = threading.Event()

    def leave(self) -> None:
        """The wire begins to send it."""
        self._clock.leg_posted(self._times)

    def end(self) -> None:
        """The wire has sent it."""
        self._clock.leg_ended(self._times)
        self._done.set()

    def wait(self, host_wait: HostWait | None = None) -> None:
        since_s = time.perf_counter()
        while not self._done.wait(None if host_wait is None else host_wait.poll()):
            pass
        self._clock.waited(since_s, self.label, self.group, for_gather=self._kind == "gather")

    def is_done(self) -> bool:
        return self._done.is_set()

    def shards(self) -> list[Tensor]:
        return [self.shard]


class CpuLink(Link):
    """What `NcclLink` is on a GPU.

    Args:
        process_group: the group of one rank.
        wire: carries the legs.
    """

    has_fused_all_reduce = True

    def __init__(self, process_group: dist.ProcessGroup, wire: CpuWire) -> None:
        super().__init__(process_group)
        self.world_size = wire.ranks
        self._wire = wire

    def reduce_scatter(self, group: int, buffer: FusionBuffer, landing: FusionBuffer | None = None) -> ScatterLeg:
        assert landing is None and buffer.travel is None, "no arm of this benchmark shards or codes"
        leg = _CpuLeg(self, "scatter", group, buffer)
        return self._send(leg, self._wire.leg_s(leg.memory.nbytes), leg.shard)

    def all_gather(self, scatter: ScatterLeg, urgency: int | None = None) -> Leg:
        assert isinstance(scatter, _CpuLeg)
        leg = _CpuLeg(self, "gather", scatter.group, scatter.buffer)
        return self._send(leg, self._wire.leg_s(leg.memory.nbytes), leg.memory[leg.shard.numel() :])

    def all_reduce_leg(self, group: int, buffer: FusionBuffer) -> ScatterLeg:
        leg = _CpuLeg(self, "all_reduce", group, buffer)
        return self._send(leg, self._wire.all_reduce_s(leg.memory.nbytes), leg.memory)

    def all_reduce(self, group: int, buffer: Tensor) -> torch.futures.Future[Tensor]:
        work = self._wire.all_reduce(buffer, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    def all_gather_small(self, value: Tensor) -> Tensor:
        return value.expand(self.world_size, *value.shape).clone()

    def exchange_numbers(self, value: int) -> Callable[[], list[int]]:
        return lambda: [value] * self.world_size

    def _send(self, leg: _CpuLeg, seconds: float, sums: Tensor) -> _CpuLeg:
        def arrive() -> None:
            self._wire.add_twins(sums)
            leg.end()

        self._wire.send(seconds, arrive, leg.leave)
        return leg
