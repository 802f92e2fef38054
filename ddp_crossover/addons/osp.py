"""The least important gradients one step late: OSP (arXiv 2306.16926). It loses to local steps, and sends everything.

Without the paper's guess of what a late gradient will be. All ranks apply the same gradients, so their parameters stay
the same, and they choose what is late from these, without asking each other.
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

from ddp_crossover.comm.agreement import require_equal
from ddp_crossover.hook.refusals import refuse_model
from ddp_crossover.hook.unwrapping import unwrapped_model
from ddp_crossover.options import switched_off
from ddp_crossover.torch_internals.ddp import GradBucket, forget_comm_hooks, rebuild_buckets
from ddp_crossover.torch_internals.loss_scale import LossScale

_FIRST_LOOK = 3  # DDP orders its buckets anew after the first step


@dataclass(frozen=True, kw_only=True)
class OSP:
    """``attach(..., sync=OSP(fraction=0.5))``: gradients of the least important buckets come one step late.

    Args:
        fraction: at most this part of the bytes is late, from 0, which is plain DDP, to 1.
        every: steps from one look at what is important, the mean of ``|gradient * parameter|``, to the next.
    """

    fraction: float
    every: int = 100

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"OSP: fraction must be from 0 to 1, got {self.fraction!r}")
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"OSP: every must be a whole number from 1, got {self.every!r}")

    def attach(
        self, ddp: DistributedDataParallel, optimizer: Optimizer | Sequence[Optimizer], **options: Any
    ) -> "OSPState":
        """What :func:`ddp_crossover.attach` does with ``sync=`` this policy."""
        ddp = unwrapped_model(ddp)
        refuse_model(ddp)
        if options or ddp.find_unused_parameters:
            raise ValueError(f"sync=OSP() cannot do with {', '.join(options) or 'find_unused_parameters=True'}")
        return OSPState(ddp, self)


class OSPState:
    """What ``attach`` returns with ``sync=OSP()``; ``late`` has the numbers of DDP's buckets that are."""

    def __init__(self, ddp: DistributedDataParallel, policy: OSP) -> None:
        require_equal("policy", {"sync": str(policy)}, ddp.process_group, next(ddp.parameters()).device)
        self.policy = policy
        self.late: set[int] = set()
        self.detached = switched_off()
        self._ddp = weakref.ref(ddp)
        self._group = ddp.process_group
        self._loss_scale = LossScale(is_watched=True)
        self._steps = 0
        self._pending: dict[int, tuple[dist.Work, Tensor]] = {}
        self._importance: list[tuple[float, int, int]] = []  # of a bucket, with its bytes and its number
        if not self.detached:
            ddp.register_comm_hook(self, OSPState.reduce)

    def detach(self) -> None:
        """Leave DDP as it was. Late gradients that have not come are lost: those of one step."""
        for work, _ in self._pending.values():
            work.wait()
        self._pending.clear()
        if not self.detached and (ddp := self._ddp()) is not None:
            forget_comm_hooks(ddp)
            rebuild_buckets(ddp)
        self.detached = True

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Send a bucket's gradients; deliver them, or those of the step before. The hook."""
        if self._loss_scale.scaler() is not None:
            raise RuntimeError("late gradients have another step's loss scale: train in bfloat16, or leave out sync=")
        buffer, index = bucket.buffer(), bucket.index()
        self._steps += index == 0
        own = buffer * (1.0 / dist.get_world_size(self._group))  # as DDP does, so it has the same bits
        work = dist.all_reduce(own, group=self._group, async_op=True)
        before = self._pending.pop(index, None)
        is_look = self._steps >= _FIRST_LOOK and (self._steps - _FIRST_LOOK) % self.policy.every == 0
        if index in self.late:
            self._pending[index] = (work, own)
        elif before is None and not is_look:
            return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
        buffer.zero_()
        for arrived in (None if index in self.late else (work, own), before):
            if arrived is not None:
                arrived[0].wait()
                buffer.add_(arrived[1])
        if is_look:
            self._look(bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    @torch.no_grad()
    def _look(self, bucket: GradBucket) -> None:
        """Note how important what is delivered is; with the last bucket, choose what is late from now on."""
        pairs = zip(bucket.gradients(), bucket.parameters(), strict=True)
        total = sum(float((gradient * parameter).abs().sum()) for gradient, parameter in pairs)
        self._importance.append((total / bucket.buffer().numel(), bucket.buffer().nbytes, bucket.index()))
        if bucket.is_last():
            left = self.policy.fraction * sum(nbytes for _, nbytes, _ in self._importance)
            self.late = {i for _, nbytes, i in sorted(self._importance) if (left := left - nbytes) >= 0}
            self._importance = []
