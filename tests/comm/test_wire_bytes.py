"""Gradients cost no more on the wire than an optimal all-reduce: 2 (n - 1) / n of their size per
rank.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch import nn

from equivalence import Case, Run, train_step
from harness import run_ranks
from models import INPUTS, OUTPUTS
from tcp_bytes import tcp_bytes_sent

# In fresh processes: connections of an earlier test could close between two readings.
pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's TCP_INFO"),
]

STEPS = 8
TOLERANCE = 0.02


class WideNet(nn.Module):
    """3 MB of fp32: enough for the headers of messages not to count."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first = nn.Linear(INPUTS, 499, dtype=dtype)
        self.middle = nn.ModuleList([nn.Linear(499, 499, dtype=dtype) for _ in range(3)])
        self.head = nn.Linear(499, OUTPUTS, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.dtype))
        for layer in self.middle:
            x = torch.tanh(layer(x))
        return self.head(x).float()


def _sent_in_steady_state(case: Case) -> tuple[float, float]:
    """Bytes of a usual step among the last ones, as the kernel counts on our sockets and as `stats()` says."""
    run = Run(case, with_dear=True)
    counted: list[int] = []
    claimed: list[int] = []
    for x, y in run.batches():
        train_step(run, x, y)
        run.synchronize()
        dist.barrier()
        counted.append(tcp_bytes_sent())
        claimed.append(run.state.stats().sent_bytes)
    run.detach()
    # The first half is left out: it holds the agreement on the plan. The median, since on a busy machine the end of one
    # step's bytes may leave in the next, at either end of what is looked at.
    sent, said = ([now - before for before, now in pairwise(of_steps[-STEPS - 1 :])] for of_steps in (counted, claimed))
    return median(sent), median(said)


@pytest.mark.parametrize(
    ("world_size", "dtype", "options"),
    [
        (2, torch.float32, {}),
        (3, torch.bfloat16, {}),
        (4, torch.float32, {}),
        (2, torch.float32, {"wire_dtype": torch.bfloat16, "schedule": "dear"}),
        (2, torch.float32, {"wire_dtype": torch.bfloat16, "schedule": "allreduce"}),
    ],
    ids=str,
)
def test_bytes_on_the_wire_are_optimal_and_what_stats_say(world_size, dtype, options) -> None:
    case = Case(
        model=partial(WideNet, dtype),
        world_size=world_size,
        steps=2 * STEPS,
        dear={"fusion_mb": 0.5} | options,
        strict=False,
    )
    size = sum(p.numel() for p in WideNet(dtype).parameters()) * options.get("wire_dtype", dtype).itemsize
    optimum = 2 * (world_size - 1) / world_size * size
    for counted, claimed in run_ranks(_sent_in_steady_state, world_size, case):
        assert counted == pytest.approx(optimum, rel=TOLERANCE)
        assert claimed == pytest.approx(counted, rel=TOLERANCE)
