"""Process groups are destroyed at places that all ranks come to, never by the garbage collector or a program's end."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from fake_streams import fake_gpu
from gpu_check_parts.training import Job, Recipe
from models import INPUTS, DeepNet
from script_server import ScriptServer

pytestmark = pytest.mark.launches

_OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"fusion_mb": 1e-4},
    "sharded": {"fusion_mb": 1e-4, "shard_optimizer": True},
    "relaxed": {"sync": dx.relaxed.LocalSGD(every=2)},
    "pairs": {"sync": dx.relaxed.LocalSGD(every=2, groups="pairs")},
}


@contextlib.contextmanager
def _destroyed_groups() -> Iterator[list[str]]:
    """Names of the groups that are destroyed in the context."""
    names: list[str] = []
    destroy = dist.destroy_process_group

    def noted(group: dist.ProcessGroup) -> None:
        names.append(group.group_name)
        destroy(group)

    with mock.patch.object(dist, "destroy_process_group", noted):
        yield names


def _train(options: dict[str, Any]) -> tuple[DistributedDataParallel, Any]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(DeepNet())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    state = dx.attach(ddp, optimizer, **options)
    for _ in range(5):
        optimizer.zero_grad()
        ddp(torch.ones(4, INPUTS)).square().mean().backward()
        optimizer.step()
    return ddp, state


def _drops_a_model(of: str, keeps_state: bool) -> tuple[int, int, int]:
    with _destroyed_groups() as names:
        ddp, state = _train(_OPTIONS[of])
        if not keeps_state:
            del state
        del ddp
        gc.collect()
        by_collector = len(names)
        state = None
        gc.collect()
        by_collector += len(names)
        _, state = _train(_OPTIONS[of])
        at_attach = len(names)
        state.detach()
        return by_collector, at_attach, len(names)


@pytest.mark.parametrize("keeps_state", [False, True])
@pytest.mark.parametrize("of", _OPTIONS)
def test_the_groups_of_a_dropped_model_end_at_the_next_attach(on_ranks, of, keeps_state) -> None:
    for by_collector, at_attach, in_the_end in on_ranks(_drops_a_model, 2, of, keeps_state):
        assert by_collector == 0
        assert at_attach > 0
        assert in_the_end == 2 * at_attach


def _finds_its_garbage_alone(late_rank: int) -> list[int]:
    counts = []
    gc.disable()
    try:
        with _destroyed_groups() as names:
            ddp, state = _train(_OPTIONS["exact"])
            cycle = [ddp, state]
            cycle.append(cycle)
            del ddp, state, cycle
            if dist.get_rank() != late_rank:
                gc.collect()
            for collects in (True, False):
                _, state = _train(_OPTIONS["exact"])
                counts.append(len(names))
                if collects:
                    gc.collect()
                state.detach()
            counts.append(len(names))
    finally:
        gc.enable()
    return counts


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_group_ends_once_all_ranks_have_given_it_up(on_ranks, late_rank) -> None:
    # At the first attach one rank has not; then it has, and the second model was detached. Each has two groups.
    assert on_ranks(_finds_its_garbage_alone, 2, late_rank) == [[0, 4, 6]] * 2


def _detaches_after_the_model_is_gone() -> tuple[int, int]:
    with _destroyed_groups() as names:
        ddp, state = _train(_OPTIONS["exact"])
        del ddp
        if dist.get_rank() == 0:
            gc.collect()
        before = len(names)
        state.detach()
        return before, len(names)


def test_detach_destroys_groups_though_the_model_is_gone_on_one_rank(on_ranks) -> None:
    assert on_ranks(_detaches_after_the_model_is_gone, 2) == [(0, 2)] * 2


def _drops_a_model_on_a_gpu(of: str) -> list[str]:
    with fake_gpu():
        job = Job(Recipe(attached={"shard_optimizer": of == "sharded"}), torch.device("cpu"), dist.get_rank(), True)
        job.train()
        with _destroyed_groups() as names:
            del job
            gc.collect()
            return names


@pytest.mark.parametrize("of", ["exact", "sharded"])
def test_the_garbage_collector_destroys_no_group_of_nccl(on_ranks, of) -> None:
    assert on_ranks(_drops_a_model_on_a_gpu, 1, of) == [[]]


_ENDS = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddp_crossover as dx
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=world_size)
destroy = dist.destroy_process_group
def noted(group):
    with open(f"destroyed{rank}", "w") as file:
        file.write(group.group_name)
    destroy(group)
dist.destroy_process_group = noted
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
ddp = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
state = dx.attach(ddp, optimizer, OPTIONS)
for _ in range(5):
    optimizer.zero_grad()
    ddp(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("options", ["fusion_mb=1e-4", 'sync=dx.relaxed.LocalSGD(every=2, groups="pairs")'])
@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_program_destroys_no_group(script_server: ScriptServer, tmp_path: Path, options, fails) -> None:
    script = _ENDS.replace("OPTIONS", options) + ("raise SystemExit(3)\n" if fails else "")
    ends = script_server.run(script, tmp_path, 2, timeout_s=120)
    assert [end.exitcode for end in ends] == [3 * fails] * 2, ends
    assert not list(tmp_path.glob("destroyed*"))


_ASKS = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddp_crossover as dx
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=world_size)

class Scaled(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 * (dist.get_world_size() if dist.is_initialized() else 1))

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
ddp = DistributedDataParallel(net)
optimizer = Scaled(net.parameters())
dx.attach(ddp, optimizer, fusion_mb=1e-4)
for _ in range(8):
    optimizer.zero_grad()
    ddp(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
torch.save(net.state_dict(), f"net{rank}")
"""


def test_an_optimizer_that_asks_for_the_number_of_ranks_finds_it(script_server: ScriptServer, tmp_path: Path) -> None:
    """Also for the last updates, although parameters are first used when the groups are gone."""
    nets = []
    for switch in ("off", "on"):
        (folder := tmp_path / switch).mkdir()
        ends = script_server.run(_ASKS, folder, 2, timeout_s=120, DDP_CROSSOVER=switch)
        assert [end.exitcode for end in ends] == [0, 0], ends
        nets.append(torch.load(folder / "net0"))
    assert all(torch.equal(value, nets[1][name]) for name, value in nets[0].items())
