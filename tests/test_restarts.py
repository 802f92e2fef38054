"""Runs that end and go on: in fresh processes, on another number of ranks, restarted by torchrun, spawned by
`torch.multiprocessing`, on a process group that was destroyed and made again. Bit for bit as plain DDP.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from equivalence import assert_same
from harness import run_faulty_ranks, run_ranks
from models import DeepNet
from restart_training import ALL_STEPS, Training, build, end, load, save, train

pytestmark = pytest.mark.launches

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "tests" / "support"
FIRST_STEPS = 8
TORCHRUN_TIMEOUT_S = 300


def _parts(training: Training) -> dict[str, Any]:
    model, optimizer = get_state_dict(training.ddp.module, training.optimizer)
    return {"model": model, "optimizer": optimizer}


def _save_distributed(training: Training, directory: str) -> None:
    dcp.save(_parts(training), checkpoint_id=directory)


def _save_while_training_goes_on(training: Training, directory: str) -> None:
    # On a group of its own: its thread would mix its collectives with DDP's.
    saving = dcp.async_save(_parts(training), checkpoint_id=directory, process_group=dist.new_group())
    train(training, FIRST_STEPS, FIRST_STEPS + 2)
    saving.result()


def _load_distributed(directory: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


WAYS = {
    "torch.save": (save, load),
    "checkpoint.save": (_save_distributed, _load_distributed),
    "checkpoint.async_save": (_save_while_training_goes_on, _load_distributed),
}


def _first_part(attach: bool, way: str, directory: str) -> None:
    training = build(attach)
    train(training, 0, FIRST_STEPS)
    WAYS[way][0](training, directory)


def _second_part(attach: bool, way: str, directory: str) -> dict[str, Any]:
    training = build(attach, partial(WAYS[way][1], directory))
    train(training, FIRST_STEPS, ALL_STEPS)
    return end(training)


def _run_in_parts(way: str, ranks: tuple[int, int], attach: tuple[bool, bool]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(_first_part, ranks[0], attach[0], way, directory)
        return run_ranks(_second_part, ranks[1], attach[1], way, directory)


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        ("torch.save", (2, 2)),
        ("torch.save", (2, 1)),
        ("torch.save", (1, 2)),
        ("checkpoint.save", (1, 2)),
        ("checkpoint.async_save", (2, 1)),
    ],
)
def test_a_run_resumed_in_fresh_processes_is_exact(way: str, ranks: tuple[int, int]) -> None:
    expected = _run_in_parts(way, ranks, (False, False))
    assert_same(_run_in_parts(way, ranks, (True, True)), expected, "end")


@pytest.mark.parametrize("attach", [(True, False), (False, True)], ids=["to_plain", "from_plain"])
def test_checkpoints_go_to_plain_ddp_and_come_from_it(attach: tuple[bool, bool]) -> None:
    expected = _run_in_parts("torch.save", (2, 2), (False, False))
    assert_same(_run_in_parts("torch.save", (2, 2), attach), expected, "end")


# Other ways to start.


def _train_on_two_groups(attach: bool, file: str) -> list[dict[str, Any]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = build(attach)
    train(first, 0, FIRST_STEPS)
    ends = [end(first)]
    net = first.ddp.module
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{file}", timedelta(seconds=30), world_size, rank)
    for model in (net, DeepNet()):
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        again = Training(ddp, optimizer, dx.attach(ddp, optimizer) if attach else None)
        train(again, 0, FIRST_STEPS)
        ends.append(end(again))
    return ends


def test_a_process_group_may_be_destroyed_and_made_again(tmp_path: Path) -> None:
    expected = run_ranks(_train_on_two_groups, 2, False, str(tmp_path / "plain"))
    assert_same(run_ranks(_train_on_two_groups, 2, True, str(tmp_path / "attached")), expected, "end")


def _train_slowly(attach: bool) -> dict[str, Any]:
    training = build(attach)
    for step in range(ALL_STEPS):
        if dist.get_rank() == 1 and step in (3, 9):
            time.sleep(2.5)
        train(training, step, step + 1)
    return end(training)


def test_a_slow_rank_below_the_timeout_is_waited_for() -> None:
    expected = run_faulty_ranks(_train_slowly, 2, False, group_timeout_s=5.0)
    slow = run_faulty_ranks(_train_slowly, 2, True, group_timeout_s=5.0)
    assert [outcome.error for outcome in slow] == [None, None]
    assert_same([outcome.result for outcome in slow], [outcome.result for outcome in expected], "end")


def _python(*arguments: str) -> None:
    search = os.pathsep.join((str(ROOT), str(SUPPORT), str(ROOT / "scripts")))
    environment = os.environ | {
        "PYTHONPATH": search,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Else gloo finds the addresses of the ranks before the restart in torchrun's store, with plain DDP as well.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    job = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = job.communicate(timeout=TORCHRUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        job.terminate()  # ends its ranks, too
        output, _ = job.communicate()
        pytest.fail(f"no end within {TORCHRUN_TIMEOUT_S} s:\n{output}")
    assert job.returncode == 0, output


def _ends_in(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"end-{rank}.pt") for rank in range(2)]


@pytest.mark.nightly
def test_ranks_spawned_by_torch_multiprocessing_are_exact(tmp_path: Path) -> None:
    script = str(SUPPORT / "spawned_script.py")
    for arm in ("plain", "attached"):
        (tmp_path / arm).mkdir()
        _python(script, arm, str(tmp_path / arm))
    assert_same(_ends_in(tmp_path / "attached"), _ends_in(tmp_path / "plain"), "end")


def test_torchrun_restarts_after_a_killed_rank_to_the_same_bits(tmp_path: Path) -> None:
    script = str(SUPPORT / "elastic_script.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    for arm, fault in (("plain", "none"), ("attached", "killed")):
        (tmp_path / arm).mkdir()
        _python(*torchrun, script, arm, str(tmp_path / arm), fault)
    assert (tmp_path / "attached" / "was-killed").exists()
    assert_same(_ends_in(tmp_path / "attached"), _ends_in(tmp_path / "plain"), "end")
