"""Training that is not synchronized: what `doctor` and `verify` say of it, beside that ranks differ."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from scripts_of_users import TRAIN, torchrun, write_script

pytestmark = pytest.mark.nightly

DDP = "DistributedDataParallel(net)"
COMMANDS = {"doctor": ("doctor", "--steps", "18"), "verify": ("verify", "--steps", "12")}


class Fault(NamedTuple):
    """A script that has it, and what names it."""

    text: str
    said: str
    before_step: str = "pass"


FAULTS = {
    "past DDP": Fault(TRAIN.replace("ddp(x)", "net(x)"), "train_it.py:26 trains Sequential, whose Distributed"),
    "group of one rank": Fault(
        TRAIN.replace(DDP, f"{DDP[:-1]}, process_group=[dist.new_group([r]) for r in range(2)][dist.get_rank()])"),
        "leave out process_group= of DistributedDataParallel",
    ),
    "second backward": Fault(
        TRAIN, "because the backward at train_it.py:25 came after the one that DDP has", "net(x).mean().backward()"
    ),
    "replaced parameters": Fault(
        TRAIN.replace(DDP, f"{DDP[:-1]}, find_unused_parameters=True); net[4] = nn.Linear(64, 4)"),
        "4.weight and 1 more came into the model",
    ),
}


# Both commands say of a fault what the ranks have found out together.
@pytest.mark.parametrize(("fault", "command"), [*((fault, "verify") for fault in FAULTS), ("past DDP", "doctor")])
def test_a_fault_is_named_where_ranks_differ(tmp_path: Path, fault: str, command: str) -> None:
    text, said, before_step = FAULTS[fault]
    script = str(write_script(tmp_path, text, before_step))
    done = torchrun("-m", "ddp_crossover", *COMMANDS[command], script)
    [why] = [line for line in done.stdout.splitlines() if line.startswith("The ranks have different parameters (")]
    assert said in why, done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_processes_without_ddp_are_named(tmp_path: Path, command: str) -> None:
    script = str(write_script(tmp_path, TRAIN.replace(DDP, "net")))
    done = torchrun("-m", "ddp_crossover", *COMMANDS[command], script)
    assert done.returncode != 0
    assert "2 processes were started, and this one has built an optimizer and no Distributed" in done.stderr
