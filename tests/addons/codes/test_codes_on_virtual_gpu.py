"""Codes on NCCL, without CUDA: every access is ordered, the host does not wait, and the bits are those of gloo."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from fake_streams import fake_gpu
from models import INPUTS, DeepNet

STEPS = 14
WIRES: dict[str, dict[str, Any]] = {
    "int8": {"wire_dtype": torch.int8},
    "top-k": {"compress": dx.TopK(0.1)},
    "top-k, int8": {"compress": dx.TopK(0.1), "wire_dtype": torch.int8},
    "sparse, bf16": {"compress": dx.TopK(0.1), "wire_dtype": torch.bfloat16},
}


class Seen(NamedTuple):
    """One training: the parameters in the end, what was not ordered, waits of the host."""

    parameters: list[torch.Tensor]
    races: dict[Any, int]
    host_waits: dict[str, int]


def train(options: dict[str, Any], on_gpu: bool) -> Seen:
    torch.manual_seed(0)
    net = DeepNet()
    races, host_waits = {}, {}
    with fake_gpu() if on_gpu else nullcontext() as gpu:
        ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        state = dx.attach(ddp, optimizer, fusion_mb=0.002, **options)
        torch.manual_seed(7 + torch.distributed.get_rank())
        for step in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.randn(8, INPUTS)).square().mean().backward()
            optimizer.step()
            if gpu is not None and step == STEPS - 4:
                gpu.host_waits.clear()
        if gpu is not None:
            races, host_waits = dict(gpu.races), dict(gpu.host_waits)
            assert gpu.seen > 100
        assert state.plan is not None and state.plan.is_coded
        state.synchronize()
        parameters = [parameter.detach().clone() for parameter in net.parameters()]
        state.detach()
    return Seen(parameters, races, host_waits)


@pytest.mark.parametrize("name", WIRES)
def test_codes_on_nccl_are_ordered_and_have_the_bits_of_gloo(on_ranks, name) -> None:
    one, other = on_ranks(train, 2, WIRES[name], True)
    assert one.races == other.races == {}
    assert all(map(torch.equal, one.parameters, other.parameters))
    if WIRES[name].get("wire_dtype") is torch.int8:  # else slices have other bounds there, and other largest elements
        on_gloo, _ = on_ranks(train, 2, WIRES[name], False)
        assert all(map(torch.equal, one.parameters, on_gloo.parameters))
        assert one.host_waits == other.host_waits == {}
