"""Times the compute of a rank's batches: from the begin of the model's forward until its last gradients arrive.

Waits for other ranks do not count, as far as they are ours: a layer that waits for them in its forward, such as
SyncBatchNorm, makes all ranks look equally slow. DDP's broadcast of buffers comes before the model's forward.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from ddp_crossover import device as gpu
from ddp_crossover.balance.balancer import Balancer
from ddp_crossover.gpu_sharing.turns import Turns
from ddp_crossover.moments import call_before_module
from ddp_crossover.planning.compute_profiler import Stopwatch


class BatchTimer:
    """Times batches for a balancer.

    Args:
        model: the model inside of DDP.
        device: the device that computes.
        turns: knows of waits.
        balancer: told of batches, and of their times when these are known.
    """

    def __init__(self, model: nn.Module, device: torch.device, turns: Turns, balancer: Balancer) -> None:
        self._device = device
        self._turns = turns
        self._balancer = balancer
        self._watch: Stopwatch | None = None
        self._begin: Any = None
        self._end: Any = None
        self._ended: deque[tuple[int, Stopwatch, Any, Any]] = deque()
        self._remove = call_before_module(model, self._forward_begins)

    def remove(self) -> None:
        self._remove()
        self._turns.time_batch(None)
        self._balancer.stop()

    @property
    def is_settled(self) -> bool:
        return self._balancer.is_settled

    def batch_begins(self) -> None:
        self._watch = Stopwatch(self._device)
        self._turns.time_batch(self._watch)
        self._begin = self._end = None

    def _forward_begins(self) -> None:
        if self._watch is not None and self._begin is None:
            self._begin = self._watch.mark()

    def bucket_arrives(self) -> None:
        """Note that a bucket's gradients have been computed; the last one ends the time of the batch."""
        if self._watch is not None:
            self._end = self._watch.mark()

    def batch_ended(self, samples: int, trained: int | None) -> None:
        """Hand times that are known to the balancer. Reads no time that the device has yet to come to.

        Args:
            samples: of the batch.
            trained: of the step that it ends, with those of earlier micro-batches; None if it ends none.
        """
        watch, self._watch = self._watch, None
        self._turns.time_batch(None)
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
