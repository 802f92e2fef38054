"""What each rank of bench_memory.py does: train a stack of equal linear layers in one mode."""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx

LAYERS, WIDTH, ROWS, STEPS = 12, 1448, 4, 12
FUSION_MB = 2.0
MODES: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "default": {},
    "bf16": {"wire_dtype": torch.bfloat16},
    "int8": {"wire_dtype": torch.int8},
    "top-k": {"compress": dx.TopK(0.01)},
    "shard": {"shard_optimizer": True},
    "ema": {},
    "strict": {"strict": True},
    "local-4": {"sync": dx.relaxed.LocalSGD(every=4)},
}


def measure(mode: str) -> dict[str, Any]:
    """Train in one mode on this rank; returns bytes, those of the rank that has most."""
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    ddp = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    options = MODES[mode]
    if options is not None:
        fusion_mb: dict[str, Any] = {} if "sync" in options else {"fusion_mb": FUSION_MB}
        state = dx.attach(ddp, optimizer, **fusion_mb | options)
        average = dx.Ema(state, 0.99) if mode == "ema" else None
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
    gc.collect()
    resident, peak = (torch.tensor(_status_bytes(field)) for field in ("VmRSS", "VmHWM"))
    for value in (resident, peak):
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    if options is not None:
        del average
        state.detach()
    return {
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "resident_bytes": resident.item(),
        "peak_bytes": peak.item(),
    }


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{field}:"))
