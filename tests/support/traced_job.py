"""A model that is traced for some steps, once it has settled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from models import INPUTS, DeepNet

SETTLED = 6  # steps until the pipeline runs
STEPS = 4


class Job:
    """A model under DeAR or plain DDP, and a way to trace it."""

    def __init__(self, with_dear: bool, **options: Any) -> None:
        torch.manual_seed(1)
        self.ddp = DistributedDataParallel(DeepNet(), bucket_cap_mb=1e-3, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters())
        self.timed: Any = (
            dx.attach(self.ddp, self.optimizer, fusion_mb=1e-3, **options)
            if with_dear
            else dx.DdpTimer(self.ddp, self.optimizer)
        )

    def train(self, steps: int, backwards: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            for done in range(1, backwards + 1):
                self.ddp.require_backward_grad_sync = done == backwards
                self.ddp(torch.randn(3, INPUTS)).square().mean().backward()
            self.optimizer.step()

    def settle(self) -> None:
        """Train until the pipeline runs and its plan stays, and let all legs end."""
        self.train(SETTLED)
        if isinstance(self.timed, dx.DearState):
            while self.timed.tuning:
                self.train(1)
            self.timed.synchronize()

    def close(self) -> None:
        if isinstance(self.timed, dx.DearState):
            self.timed.detach()


def traced(with_dear: bool, path: str, backwards: int = 1, **options: Any) -> tuple[Any, ...]:
    """Spans, figures and steps of a trace, and the same from the file it was saved to."""
    job = Job(with_dear, **options)
    job.settle()
    with job.timed.trace() as trace:
        job.train(STEPS, backwards)
    file = Path(path) / f"{with_dear}-rank{dist.get_rank()}.json"
    trace.save(file)
    again = dx.Trace.load(file)
    job.close()
    return tuple((t.spans(), t.figures(), t.steps(), t.rank, t.wall_offset_s) for t in (trace, again))
