"""What attach says of a lease on a GPU: what would make turns longer, or gaps shorter, than they need be."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from fake_streams import fake_gpu
from heard import heard

BROADCAST = "DDP broadcasts the model's buffers before each forward"


def said_at_attach(has_buffers: bool, broadcasts: bool, has_lease: bool) -> list[str]:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=has_buffers))
    with tempfile.TemporaryDirectory() as directory, fake_gpu(), heard() as said:
        ddp = DistributedDataParallel(net, broadcast_buffers=broadcasts)
        lease = dx.GpuLease("cpu:0", job="job", directory=directory, spawn_broker=False) if has_lease else None
        state = dx.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), lease=lease, fusion_mb=1.0)
        state.detach()
        if lease is not None:
            lease.close()
    return said


@pytest.mark.parametrize(
    ("has_buffers", "broadcasts", "has_lease", "expected"),
    [(True, True, True, True), (False, True, True, False), (True, False, True, False), (True, True, False, False)],
    ids=["broadcasts", "no buffers", "broadcast_buffers=False", "no lease"],
)
def test_broadcasts_that_the_lease_does_not_know_are_named(
    on_ranks, has_buffers, broadcasts, has_lease, expected
) -> None:
    [said] = on_ranks(said_at_attach, 1, has_buffers, broadcasts, has_lease)
    assert any(BROADCAST in line for line in said) == expected, said
