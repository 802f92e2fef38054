"""The core trains without any add-on: a default attach imports none."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
optimizer = torch.optim.AdamW(model.parameters())
state = dx.attach(model, optimizer, fusion_mb=1.0)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
assert state.stats().pipelined_iterations, state.progress()
state.detach()
print(*sorted(name for name in sys.modules if name.startswith("ddp_crossover.")))
"""


def test_a_default_attach_imports_no_add_on() -> None:
    job = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stderr
    imported = job.stdout.split()
    assert "ddp_crossover.hook.reducer" in imported
    others = ("addons", "integrations", "optim", "relaxed", "data")
    assert [name for name in imported if name.split(".")[1] in others] == []
