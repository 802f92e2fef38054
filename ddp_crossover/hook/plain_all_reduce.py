"""Reduces DDP's buckets with plain all-reduces in the hook, as DDP does by itself, and defers nothing.

Stands in for the pipeline in the first iterations, with ``schedule="allreduce"``, and where the tuner finds that plain
all-reduces are as fast. It sends in the wire dtype and adds up in the same order as the legs do.
"""
# No `from __future__ import annotations`: DDP checks the annotations of what it calls, and expects types.

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddp_crossover.comm.all_reduce import wait_for_futures
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.sums import RankWeights, scale_into
from ddp_crossover.comm.wire import Wire
from ddp_crossover.compute_waits import ComputeWaits
from ddp_crossover.torch_internals.ddp import GradBucket


class PlainAllReduce:
    """All-reduces one model's buckets; see :class:`ddp_crossover.hook.reduction.Reduction`.

    Args:
        link: sends the buckets.
        compute_waits: what waits of compute go through.
        device: device of the gradients.
        wire: what gradients are on the wire; none is coded.
        weights: what each rank's gradients are multiplied by.
        all_reduce: sums a bucket, given its index, over all ranks; by default, the link does.
    """

    is_pipelined = False
    gradients = None
    unassigned = ()

    def __init__(
        self,
        link: Link,
        compute_waits: ComputeWaits,
        device: torch.device,
        wire: Wire,
        weights: RankWeights,
        all_reduce: Callable[[int, Tensor], torch.futures.Future[Tensor]] | None = None,
    ) -> None:
        self._link = link
        self._all_reduce = all_reduce or link.all_reduce
        self._compute_waits = compute_waits
        self._is_on_cpu = device.type == "cpu"
        self._wire = wire
        self._weights = weights
        self._under_way: list[torch.futures.Future[Tensor]] = []
        self._last_bucket_s = 0.0

    def retire(self) -> None:
        """Wait for all-reduces of a backward that raised, which still write into DDP's buckets."""
        for future in self._under_way:
            future.wait()
        self._under_way.clear()

    def begin_backward(self, *, same_buckets: bool) -> None:
        self._link.begin_iteration()

    def reduce(self, bucket: GradBucket, index: int, parameters: list[Tensor]) -> torch.futures.Future[Tensor]:
        """All-reduce one bucket; the future's value are its gradients, averaged over ranks."""
        buffer = bucket.buffer().detach()  # only values are sent, even under backward(create_graph=True)
        on_wire = buffer
        if (dtype := self._wire.travels_as(buffer.dtype)) is not buffer.dtype:
            on_wire = torch.empty_like(buffer, dtype=dtype)
        scale_into(on_wire, buffer, self._weights.own)
        future = self._all_reduce(index, on_wire)
        self._under_way.append(future)
        self._last_bucket_s = time.perf_counter()
        return future if on_wire is buffer else future.then(lambda summed: buffer.copy_(summed.value()))

    def before_ddp_writes(self) -> None:
        """Let others have the device, since DDP waits for other ranks next."""
        self._wait()
        self._compute_waits.others.release()

    def _wait(self) -> None:
        """Wait on the host for the all-reduces, if a lease is held: DDP's C++ wait would block while holding it."""
        if not self._under_way:
            return
        if not self._is_on_cpu:
            if (stream := self._link.all_reduce_stream) is not None:
                self._compute_waits.others.before_stream_waits(stream)  # as DDP makes it do next
            return
        with self._compute_waits.of("all-reduces") as host_wait:
            if host_wait is None:
                return
            wait_for_futures(self._under_way, host_wait)
            # Release the lease: `step()` takes its own turn, and the script may first load another micro-batch.
            self._compute_waits.others.release()
            self._link.clock.waited(self._last_bucket_s, "all-reduces")
        self._under_way.clear()
        self._last_bucket_s = time.perf_counter()

    def end_backward(self) -> None:
        """Note the end of the backward, in which DDP itself has waited for the all-reduces."""
        self._under_way.clear()
        if self._is_on_cpu:
            self._link.clock.waited(self._last_bucket_s, "all-reduces")

    def expect_unreduced(self) -> None:
        pass

    def follow(self, use_rank: Sequence[int]) -> None:
        pass

    def end_forward(
        self, call_before_backward: Callable[[Callable[[], None]], bool] | None, *, on_all_ranks: bool
    ) -> None:
        pass
