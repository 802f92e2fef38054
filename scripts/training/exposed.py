"""Exposed communication of plain DDP: the time in which compute waits for gradients."""

# No `from __future__ import annotations` here: DDP reads the hook's annotations, and wants types.
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class DdpExposure:
    """Sums up how long `backward()` still waits after its own compute is done.

    Counted: from the moment the last bucket's all-reduce is on its way until `backward()` returns,
    which is the wait for all buckets in flight, and DDP's short unpacking of them. Not counted:
    that communication takes processor time from compute while both run. `DearState.stats()` has the
    same kind of figure, summed over the places where DeAR waits: forward, clipping, flushes.

    For CPU tensors only. On CUDA the host runs ahead of the GPU: its clock does not see the wait.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.total_s = 0.0
        self._last_bucket_sent = 0.0
        ddp.register_comm_hook(self, _timed_allreduce)

    def bucket_sent(self) -> None:
        """To be called after each bucket; the last one of a backward pass counts."""
        self._last_bucket_sent = time.perf_counter()

    def backward_returned(self) -> None:
        """To be called right after a `backward()` that sends gradients."""
        self.total_s += time.perf_counter() - self._last_bucket_sent


def _timed_allreduce(meter: DdpExposure, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook, and a look at the clock."""
    future = allreduce_hook(dist.group.WORLD, bucket)
    meter.bucket_sent()
    return future
