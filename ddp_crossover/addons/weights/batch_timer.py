"""Times the compute of a rank's batches: from the begin of the model's forward until its last gradients arrive.

Waits for other ranks do not count, as far as they are ours: a layer that waits for them in its forward, such as
SyncBatchNorm, makes all ranks look equally slow. DDP's broadcast of buffers comes before the model's forward.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_crossover import device as gpu
from ddp_crossover.addons.weights.balancer import Balancer
from ddp_crossover.moments import Follower, Moments
from ddp_crossover.plan.compute_profiler import Stopwatch


class BatchTimer(Follower):
    """Times batches for a balancer, from when it is made until it is removed.

    Args:
        moments: those of the model's training.
        device: the device that computes.
        balancer: told of batches, and of their times when these are known.
    """

    def __init__(self, moments: Moments, device: torch.device, balancer: Balancer) -> None:
        self._moments = moments
        self._device = device
        self._balancer = balancer
        self._watch: Stopwatch | None = None
        self._begin: Any = None
        self._end: Any = None
        self._ended: deque[tuple[int, Stopwatch, Any, Any]] = deque()
        moments.follow(self, inside=True)

    def remove(self) -> None:
        self._moments.leave(self)
        self._balancer.stop()

    @property
    def is_settled(self) -> bool:
        return self._balancer.is_settled

    def batch_begins(self) -> None:
        self._watch = Stopwatch(self._device)
        self._begin = self._end = None

    def compute_begins(self) -> None:
        if self._watch is not None and self._begin is None:
            self._begin = self._watch.mark()

    def bucket_arrives(self, parameters: Sequence[Tensor], *, is_first: bool) -> None:
        if self._watch is not None:
            self._end = self._watch.mark()  # the last one ends the time of the batch

    def waiting(self, what: Hashable) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._watch is None else self._watch.waiting()

    def batch_ended(self, samples: int, trained: int | None) -> None:
        """Hand times that are known to the balancer. Reads no time that the device has yet to come to.

        Args:
            samples: of the batch.
            trained: of the step that it ends, with those of earlier micro-batches; None if it ends none.
        """
        watch, self._watch = self._watch, None
        if trained is None:
            return
        if watch is not None and self._begin is not None and self._end is not None:
            self._ended.append((samples, watch, self._begin, self._end))
        while self._ended and self._is_over(self._ended[0][3]):
            samples, watch, begin, end = self._ended.popleft()
            self._balancer.add_time(samples, watch.seconds([begin, end], waits=False)[-1])
        self._balancer.batch_ended(trained)

    def step_skipped(self, samples: int) -> None:
        """Note that all ranks have left out the backward of a step, of so many samples on this rank."""
        self._balancer.step_skipped(samples)

    def _is_over(self, end: Any) -> bool:
        at = end[0]
        return isinstance(at, float) or gpu.has_happened(at, if_broken=False)
