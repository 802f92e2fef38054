"""Training with a lease on real ranks, for tests."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from models import INPUTS, DeepNet


def make_lease(directory: str, **options: Any) -> dx.GpuLease:
    """A lease of this rank, each on a "device" of its own."""
    settings: dict[str, Any] = {
        "resource": f"cpu:{dist.get_rank()}",
        "job": "training",
        "directory": directory,
        "max_stall_s": 10.0,
    }
    lease = dx.GpuLease(**{**settings, **options})
    assert lease.wait_until_connected(20)
    return lease


class Job:
    """A model, its optimizer and, attached to both, a state. With `lease=None` it is the same without."""

    def __init__(self, lease: dx.GpuLease | None, model: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(1)
        self.lease = lease
        self.ddp = DistributedDataParallel(model or DeepNet(), bucket_cap_mb=1e-3, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters())
        options = {"fusion_mb": 1e-3, "strict": True, **options}
        self.state = dx.attach(self.ddp, self.optimizer, lease=lease, **options)
        self._generator = torch.Generator().manual_seed(10 + dist.get_rank())

    def batch(self) -> torch.Tensor:
        return torch.randn(3, INPUTS, generator=self._generator)

    def step(self, pause_s: float = 0.0) -> None:
        """One step; `pause_s` makes this rank late, so that the others wait for it."""
        self.optimizer.zero_grad()
        output = self.ddp(self.batch())
        time.sleep(pause_s)
        output.square().mean().backward()
        self.optimizer.step()

    def end(self) -> list[torch.Tensor]:
        """The parameters; nothing of the state and the lease is left."""
        self.state.detach()
        if self.lease is not None:
            self.lease.close()
        return [parameter.detach().clone() for parameter in self.ddp.module.parameters()]


def train(directory: str | None, steps: int, pause_s: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """Parameters and statistics after some steps, in which rank 1 is late by `pause_s`."""
    job = Job(None if directory is None else make_lease(directory), **options)
    for _ in range(steps):
        job.step(pause_s if dist.get_rank() == 1 else 0.0)
    stats = job.state.stats()
    return job.end(), stats


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
