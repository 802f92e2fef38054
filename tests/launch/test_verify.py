"""`python -m ddp_crossover verify`: says whether a script trains as with plain DDP, and where it first does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts_of_users import python, torchrun, write_script

VERIFY = ("-m", "ddp_crossover", "verify", "--steps", "15", "--fusion-mb", "0.01")
# What a bug of ours would look like: one bit, from the seventh step on, only where we are attached.
ONE_BIT = "(len(losses) == 6 and 'forward' in vars(ddp) and net[3].bias.data.view(torch.int32)[:1].bitwise_xor_(1))"


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_script_is_found_to_be_the_same(tmp_path: Path, ranks) -> None:
    done = torchrun(*VERIFY, "--json", str(write_script(tmp_path)), ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert verdict["exit_status"] == 0 and verdict["first_difference"] is None
    assert verdict["steps"] == verdict["losses"] == 15 and verdict["finished_steps"] > 5
    assert ("adds in rank order" in verdict["text"]) == (ranks > 2)


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    done = torchrun(*VERIFY, str(write_script(tmp_path, before_step=ONE_BIT)))
    assert done.returncode == 1
    assert "DIFFERENT from plain DDP: 3.bias before optimizer step 7" in done.stdout
    assert "rank 1: DIFFERENT" in done.stderr


def test_a_script_that_does_not_repeat_itself_cannot_be_verified(tmp_path: Path) -> None:
    draws = "x.normal_(generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4), 'big')))"
    script = write_script(tmp_path, before_step=f"{draws}; ddp(x).sum().backward()")
    done = torchrun(*VERIFY, str(script))
    assert done.returncode != 0 and "the script does not repeat itself with plain DDP" in done.stdout


def test_a_script_without_ddp_cannot_be_verified(tmp_path: Path) -> None:
    done = python(*VERIFY, str(write_script(tmp_path, "print('nothing to see')")))
    assert done.returncode == 2 and "has trained no DDP model (plain):\nnothing to see" in done.stderr
