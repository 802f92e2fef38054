"""Times plain DDP with the clock that times DeAR, for comparison."""
# No `from __future__ import annotations` here: DDP checks the annotations of hooks, and expects types.

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.comm.all_reduce import all_reduce_sum, stream_for_all_reduces
from ddp_crossover.moments import Moments
from ddp_crossover.report.clock import CommClock
from ddp_crossover.report.recording import recording
from ddp_crossover.report.trace import Trace
from ddp_crossover.torch_internals.autograd import call_after_backward
from ddp_crossover.torch_internals.ddp import GradBucket


class DdpTimer:
    """Times the all-reduces of a plain DDP model, and how long backward waits for them.

    Registers a communication hook that does what DDP does without one. On CUDA the sums stay 0, because the host runs
    ahead of the GPU; traces are right on CUDA, too. On NCCL this shows plain DDP at its best: all-reduces overlap
    backward with every version of torch, while DDP without a hook may stop backward at each of them (torch 2.15 with
    its default backend, unless ``TORCH_DIST_USE_NCCL2=0``).

    Args:
        ddp: the model, without a communication hook.
        optimizer: its optimizer, or a list of all its optimizers. In a trace, their ``step()`` calls show as updates
            and mark where a training step ends.

    Example::

        timer = DdpTimer(ddp, optimizer)
        with timer.trace() as trace:
            train(steps=20)
        trace.save("ddp.json")
    """

    def __init__(self, ddp: DistributedDataParallel, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        self.clock = CommClock()
        # Weak: the reducer, which is opaque to the garbage collector, holds this object.
        self._ddp = weakref.ref(ddp)
        self._optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self._process_group: dist.ProcessGroup = ddp.process_group
        self._device = next(ddp.parameters()).device
        # A stream of normal priority, like the backend's own.
        self._stream = stream_for_all_reduces(self._process_group, self._device)
        self._last_bucket_s: float | None = None
        ddp.register_comm_hook(self, timed_all_reduce)

    @property
    def exposed_s(self) -> float:
        """Seconds that backward has waited for all-reduces so far; 0 on CUDA.

        Each wait is measured from when the last bucket was handed over until DDP has unpacked all buckets.
        """
        return self.clock.sums().exposed_s

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record everything that happens in the context, see :class:`Trace`.

        Raises:
            RuntimeError: if this model is being traced already.
            TypeError: if the ``step()`` of an optimizer takes no hooks.
        """
        ddp = self._ddp()
        assert ddp is not None  # the model is running
        trace = Trace(dist.get_rank(self._process_group), "plain DDP", self._device)
        with recording(trace, self.clock, Moments(ddp, self._optimizers)):
            yield trace

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """All-reduce one bucket and time it; the implementation of :func:`timed_all_reduce`."""
        buffer = bucket.buffer().detach().mul_(1.0 / self._process_group.size())
        future = all_reduce_sum(buffer, self._process_group, self.clock, bucket.index(), self._stream)
        if self._device.type == "cpu":
            # The inner call queues it behind DDP's own callback. Every bucket does this, because the last bucket may
            # belong to a graph task of its own.
            call_after_backward(lambda: call_after_backward(self._backward_ended))
            self._last_bucket_s = time.perf_counter()
        return future

    def _backward_ended(self) -> None:
        if self._last_bucket_s is not None:
            self.clock.waited(self._last_bucket_s, "all-reduces")
            self._last_bucket_s = None


def timed_all_reduce(timer: DdpTimer, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: all-reduce the bucket and record when it begins and ends."""
    return timer.reduce(bucket)
