"""The host waits for nothing in a steady step, whatever the settings: on a GPU that counts what would block it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.nccl.nccl_link import _NcclLeg
from ddp_crossover.step.update_runner import UpdateRunner
from fake_streams import fake_gpu
from models import INPUTS, DeepNet

WARM_STEPS = 12
STEPS = 3
SGD = {"lr": 0.01, "momentum": 0.9}
NORMS, SHARDED = {"norms": "sharded"}, {"shard_optimizer": True}
# How to train: the optimizer and its options, the clipping, options of attach.
SETTINGS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "stock clipping": ("SGD", SGD, "stock", {}),
    "own clipping": ("SGD", SGD, "own", {}),
    "two clippings, norms of shards": ("SGD", SGD, "twice", NORMS),
    "fused AdamW": ("AdamW", {"fused": True}, "", {}),
    "sharded": ("SGD", SGD, "", SHARDED),
    "sharded, stock clipping, norms of shards": ("SGD", SGD, "stock", SHARDED | NORMS),
    "sharded LARS": ("LARS", {"lr": 0.1, "momentum": 0.9}, "", SHARDED),
    "sharded LAMB": ("LAMB", {"lr": 0.01}, "", SHARDED),
    "sharded LARS, own clipping": ("LARS", {"lr": 0.1}, "own", SHARDED),
    "sharded, bf16 on the wire": ("SGD", SGD, "", SHARDED | {"wire_dtype": torch.bfloat16}),
}


def host_waits(name: str) -> dict[str, int]:
    kind, options, clip, attached = SETTINGS[name]
    torch.manual_seed(0)
    net = DeepNet()
    with fake_gpu() as gpu:
        ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
        optimizer = getattr(torch.optim, kind, None) or getattr(dx.optim, kind)
        optimizer = optimizer(ddp.parameters(), **options)
        state = dx.attach(ddp, optimizer, fusion_mb=0.002, **attached)
        for step in range(WARM_STEPS + STEPS):
            if step == WARM_STEPS:
                gpu.host_waits.clear()
            batch = torch.randn(8, INPUTS)
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            if clip == "own":
                state.clip_grad_norm_(0.01)
            elif clip:
                for _ in range(2 if clip == "twice" else 1):
                    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
            optimizer.step()
        assert state.stats().pipelined_iterations > WARM_STEPS / 2
        waits = dict(gpu.host_waits)
        state.detach()
    return waits


@pytest.mark.parametrize("name", SETTINGS)
def test_the_host_waits_for_nothing(on_ranks, name: str) -> None:
    for waits in on_ranks(host_waits, 2, name):
        if "LAMB" in name:
            waits.pop("item")  # its numbers of steps are on the CPU, also beside parameters on a GPU
        assert waits == {}


@pytest.mark.parametrize(
    "blocks",
    [
        lambda tensor: tensor[[0, 1]],
        lambda tensor: tensor.new_tensor([1.0]),
        lambda tensor: torch.tensor(1.0),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.sum().item(),
        lambda tensor: bool(tensor.any()),
    ],
)
def test_what_blocks_the_host_is_noticed(blocks) -> None:
    with fake_gpu() as gpu:
        tensor = torch.ones(3)
        assert not gpu.host_waits
        blocks(tensor)
        assert sum(gpu.host_waits.values()) == 1
        gpu.synchronize()
        assert gpu.host_waits["synchronize"] == 1


def updates_in_a_step(legs_end: bool) -> tuple[int, int]:
    """How often the optimizer is called to update, and the number of groups."""
    torch.manual_seed(0)
    # Patched for as long as the pipeline lives, which keeps the method that it calls.
    counted = mock.patch.object(UpdateRunner, "apply", autospec=True, side_effect=UpdateRunner.apply)
    with fake_gpu(), mock.patch.object(_NcclLeg, "is_done", lambda leg: legs_end), counted as apply:
        ddp = DistributedDataParallel(DeepNet(), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), **SGD)
        state = dx.attach(ddp, optimizer, fusion_mb=0.002)
        for _ in range(WARM_STEPS):
            optimizer.zero_grad()
            apply.reset_mock()
            ddp(torch.randn(8, INPUTS)).square().mean().backward()
            calls = apply.call_count
            optimizer.step()
        groups = len(state.plan.groups)
        state.detach()
    return calls, groups


def test_groups_whose_legs_have_ended_are_updated_together(on_ranks) -> None:
    for calls, groups in on_ranks(updates_in_a_step, 2, True):
        assert calls == 1 < groups
    for calls, groups in on_ranks(updates_in_a_step, 2, False):
        assert calls == groups
