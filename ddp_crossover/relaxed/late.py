"""Exact gradients, but the least important ones one step late, so that they travel under the next step.

Source: OSP, arXiv 2306.16926, without its guess of what a late gradient will be. All ranks apply the same gradients, so
their parameters stay the same, and they choose what is late from these, without asking each other.
"""
# No `from __future__ import annotations` here: DDP checks the annotations of hooks, and expects types.

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.collectives.agreement import require_equal
from ddp_crossover.ddp.refusals import refuse_model
from ddp_crossover.ddp.unwrapping import unwrapped_model
from ddp_crossover.options import switched_off
from ddp_crossover.relaxed.refusals import refuse_unused
from ddp_crossover.torch_internals.ddp import GradBucket, forget_comm_hooks, rebuild_buckets
from ddp_crossover.torch_internals.loss_scale import LossScale

# DDP orders its buckets anew after the first step.
_FIRST_LOOK = 3


@dataclass(frozen=True, kw_only=True)
class Late:
    """``attach(..., sync=Late(fraction=0.5))``: gradients of the least important buckets come one step late.

    Args:
        fraction: at most this part of the bytes is late, from 0 to 1. 0 is plain DDP.
        every: steps from one look at what is important to the next: the mean of ``|gradient * parameter|``.

    Raises:
        ValueError: for numbers that are out of range.
    """

    fraction: float
    every: int = 100

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"Late: fraction must be from 0 to 1, got {self.fraction!r}")
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Late: every must be a whole number from 1, got {self.every!r}")

    def attach(
        self, ddp: DistributedDataParallel, optimizer: Optimizer | Sequence[Optimizer], **options: Any
    ) -> "LateState":
        """What :func:`ddp_crossover.attach` does with ``sync=`` this policy."""
        if options:
            raise ValueError(f"{', '.join(options)}: sync=Late() takes no options of exact training")
        return LateState(ddp, self)


class LateState:
    """What :func:`ddp_crossover.attach` returns with ``sync=Late()``.

    Args:
        ddp: the model.
        policy: what is late.

    Attributes:
        late: numbers of DDP's buckets whose gradients are late.
        detached: whether DDP trains as it was before attach.
    """

    def __init__(self, ddp: DistributedDataParallel, policy: Late) -> None:
        ddp = unwrapped_model(ddp)
        refuse_model(ddp)
        refuse_unused(ddp)
        require_equal("policy", {"sync": str(policy)}, ddp.process_group, next(ddp.parameters()).device)
        self.policy = policy
        self.late: set[int] = set()
        self._ddp = weakref.ref(ddp)
        self._group = ddp.process_group
        self._loss_scale = LossScale(is_watched=True)
        self._steps = 0
        self._pending: dict[int, tuple[dist.Work, Tensor]] = {}
        self._importance: list[tuple[float, int, int]] = []  # of a bucket, with its bytes and its number
        self.detached = switched_off()
        if not self.detached:
            ddp.register_comm_hook(self, late_hook)

    def detach(self) -> None:
        """Leave DDP as it was. Late gradients that have not come are lost: those of one step."""
        if self.detached:
            return
        self.detached = True
        for work, _ in self._pending.values():
            work.wait()
        self._pending.clear()
        if (ddp := self._ddp()) is not None:
            forget_comm_hooks(ddp)
            rebuild_buckets(ddp)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send a bucket's gradients; deliver them, or those of the step before."""
        if self._loss_scale.scaler() is not None:
            raise RuntimeError(
                "late gradients have the loss scale of another step: train in bfloat16, or leave out sync="
            )
        buffer, index = bucket.buffer(), bucket.index()
        if index == 0:
            self._steps += 1
        own = buffer * (1.0 / dist.get_world_size(self._group))  # as DDP does, so it has the same bits
        work = dist.all_reduce(own, group=self._group, async_op=True)
        is_look = self._steps >= _FIRST_LOOK and (self._steps - _FIRST_LOOK) % self.policy.every == 0
        before = self._pending.pop(index, None)
        if index in self.late:
            self._pending[index] = (work, own)
            future = self._deliver(buffer, before)
        elif before is None and not is_look:
            future = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
        else:  # it was late until now, or is looked at
            future = self._deliver(buffer, (work, own), before)
        if is_look:
            self._look(bucket)
        return future

    def _deliver(self, buffer: Tensor, *arrived: tuple[dist.Work, Tensor] | None) -> torch.futures.Future[Tensor]:
        """Wait for sums, and deliver them together; zeros if there are none."""
        buffer.zero_()
        for one in arrived:
            if one is not None:
                work, gradients = one
                work.wait()
                buffer.add_(gradients)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    @torch.no_grad()
    def _look(self, bucket: GradBucket) -> None:
        """Note how important what is delivered is; with the last bucket, choose what is late from now on."""
        pairs = zip(bucket.gradients(), bucket.parameters(), strict=True)
        total = sum(float((gradient * parameter).abs().sum()) for gradient, parameter in pairs)
        buffer = bucket.buffer()
        self._importance.append((total / buffer.numel(), buffer.nbytes, bucket.index()))
        if not bucket.is_last():
            return
        left = self.policy.fraction * sum(nbytes for _, nbytes, _ in self._importance)
        self.late = set()
        for _, nbytes, index in sorted(self._importance):
            if nbytes > left:
                break
            left -= nbytes
            self.late.add(index)
        self._importance = []


def late_hook(state: LateState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook of :class:`LateState`."""
    return state.reduce(bucket)
