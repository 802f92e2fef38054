"""The state of a sharded optimizer: how much of it a rank has, and what checkpoints see."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import ddp_crossover as dx
from harness import run_ranks
from models import INPUTS, OUTPUTS, DeepNet
from optimizers import two_optimizers
from reference import rank_order_hook

pytestmark = pytest.mark.launches

GROUPS_MB = 1e-3


def train(ddp: DistributedDataParallel, optimizers: list[Optimizer], steps: range) -> None:
    for index in steps:
        generator = torch.Generator().manual_seed(100 * index + dist.get_rank())
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.randn(4, INPUTS, generator=generator)
        nn.functional.mse_loss(ddp(x), torch.randn(4, OUTPUTS, generator=generator)).backward()
        for optimizer in optimizers:
            optimizer.step()


def made() -> tuple[DistributedDataParallel, Optimizer, dx.DearState]:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(DeepNet())
    own = AdamW(ddp.parameters(), lr=0.01)
    return ddp, own, dx.attach(ddp, own, shard_optimizer=True, fusion_mb=GROUPS_MB)


def _bytes_of_shards() -> tuple[int, int, int]:
    ddp, optimizer, state = made()
    train(ddp, [optimizer], range(6))
    mine = bytes_of(state._updates.states.of_ranges)
    state.consolidate()
    return mine, bytes_of(optimizer.state), len(state.plan.groups)


def bytes_of(state: Mapping[Any, dict[str, torch.Tensor]]) -> int:
    return sum(value.nbytes for one in state.values() for value in one.values())


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_holds_its_part_of_the_state(world_size: int) -> None:
    held = run_ranks(_bytes_of_shards, world_size)
    numel = sum(p.numel() for p in DeepNet().parameters())
    for mine, whole, groups in held:
        assert whole > 2 * 4 * numel
        # Two moments of an n-th of the elements; each group may give a rank one element more, and each range a counter.
        assert mine <= 2 * 4 * (numel / world_size + groups) + 4 * (groups + 40)
    assert sum(mine for mine, _, _ in held) >= 2 * 4 * numel


def _save_alone() -> list[str]:
    ddp, optimizer, state = made()
    empty = optimizer.state_dict()  # before the first step there is nothing to put together
    assert not empty["state"]
    train(ddp, [optimizer], range(6))
    said = []
    if dist.get_rank() == 0:  # as scripts save; the other rank goes on, and nobody may wait for it
        for look in (
            optimizer.state_dict,
            lambda: len(optimizer.state),
            lambda: optimizer.state[next(ddp.parameters())],
            lambda: copy.deepcopy(optimizer),
            lambda: pickle.dumps(optimizer),
        ):
            with pytest.raises(RuntimeError, match=r"call state\.consolidate\(\) on all ranks first") as error:
                look()
            said.append(str(error.value))
    train(ddp, [optimizer], range(6, 8))
    state.consolidate(to=1)
    if dist.get_rank() == 1:
        assert len(optimizer.state_dict()["state"]) == len(list(ddp.parameters()))
    else:
        with pytest.raises(RuntimeError, match="consolidate"):
            optimizer.state_dict()
    with pytest.raises(ValueError, match="to=2"):
        state.consolidate(to=2)
    train(ddp, [optimizer], range(8, 10))
    return said


def test_a_rank_that_saves_alone_gets_an_error_and_nobody_hangs() -> None:
    said, _ = run_ranks(_save_alone, 2)
    assert len(said) == 5


def _profiled(with_stack: bool) -> list[torch.Tensor]:
    ddp, optimizer, _ = made()
    train(ddp, [optimizer], range(6))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=with_stack):
        train(ddp, [optimizer], range(6, 8))
    return [parameter.detach() for parameter in ddp.parameters()]


def test_a_profile_with_stacks_which_asks_for_the_state_in_each_step_changes_nothing() -> None:
    [with_stacks, _], [without, _] = run_ranks(_profiled, 2, True), run_ranks(_profiled, 2, False)
    torch.testing.assert_close(with_stacks, without, rtol=0, atol=0)


def _part(directory: str, name: str, resumed: str | None, steps: range, sharded: bool) -> None:
    """Train a part, from a checkpoint or from the start, and leave a checkpoint."""
    torch.manual_seed(1)
    ddp = DistributedDataParallel(DeepNet())
    optimizers = two_optimizers(ddp.module)
    if resumed is not None:
        saved = torch.load(Path(directory, resumed))
        ddp.module.load_state_dict(saved["model"])
        for optimizer, of_optimizer in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(of_optimizer)
    state = None
    if sharded:
        state = dx.attach(ddp, optimizers, shard_optimizer=True, fusion_mb=GROUPS_MB)
    elif dist.get_world_size() > 2:
        ddp.register_comm_hook(None, rank_order_hook)
    train(ddp, optimizers, steps)
    if state is not None:
        state.consolidate(to=0)
    if dist.get_rank() == 0:
        saved = {"model": ddp.module.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}
        torch.save(saved, Path(directory, name))


@pytest.mark.parametrize(("first", "then"), [(2, 3), (3, 1), (1, 2)])
def test_another_world_size_goes_on_from_a_checkpoint(tmp_path: Path, first: int, then: int) -> None:
    # Muon for matrices, by owner, and AdamW for the rest, by element.
    directory = str(tmp_path)
    run_ranks(_part, first, directory, "sharded", None, range(6), True)
    run_ranks(_part, first, directory, "plain", None, range(6), False)
    assert_same_files(tmp_path, "sharded", "plain")
    ends = []
    for start in ("sharded", "plain"):
        for sharded in (True, False):
            ends.append(f"end of {start}, {sharded}")
            run_ranks(_part, then, directory, ends[-1], start, range(6, 12), sharded)
    for end in ends[1:]:
        assert_same_files(tmp_path, end, ends[0])


def assert_same_files(directory: Path, *names: str) -> None:
    one, other = (torch.load(directory / name) for name in names)
    assert one["optimizers"][0]["state"] and one["optimizers"][1]["param_groups"]
    torch.testing.assert_close(one, other, rtol=0, atol=0)
