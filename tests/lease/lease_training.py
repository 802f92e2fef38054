"""Training with a lease on real ranks, for tests."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from models import INPUTS, DeepNet
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx


def make_lease(directory: str, **options: Any) -> dx.GpuLease:
    """A lease of this rank: both ranks are on "one device"."""
    settings: dict[str, Any] = {"resource": "cpu:0", "job": "training", "directory": directory, "max_stall_s": 10.0}
    lease = dx.GpuLease(**{**settings, **options})
    return lease


class Job:
    """A model, its optimizer and, attached to both, a state."""

    def __init__(self, lease: dx.GpuLease | None, model: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(1)
        self.lease = lease
        self.ddp = DistributedDataParallel(model or DeepNet(), bucket_cap_mb=1e-3, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters())
        options = {"fusion_mb": 1e-3, "strict": True, **options}
        self.state = dx.attach(self.ddp, self.optimizer, lease=lease, **options)
        self.generator = torch.Generator().manual_seed(10 + dist.get_rank())

    def step(self, pause_s: float = 0.0) -> None:
        self.optimizer.zero_grad()
        output = self.ddp(torch.randn(3, INPUTS, generator=self.generator))
        time.sleep(pause_s)
        output.square().mean().backward()
        self.optimizer.step()

    def parameters(self) -> list[torch.Tensor]:
        self.state.synchronize()
        return [parameter.detach().clone() for parameter in self.ddp.module.parameters()]
