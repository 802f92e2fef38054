"""`python -m ddp_crossover verify`: says whether a script trains as with plain DDP, and where it first does not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from scripts_of_users import TRAIN, python, torchrun, torchruns_summary, write_script

VERIFY = ("-m", "ddp_crossover", "verify", "--steps", "15", "--fusion-mb", "0.01")
# What a bug of ours would look like: one bit, from the seventh step on, only where we are attached.
ONE_BIT = "(len(losses) == 6 and 'forward' in vars(ddp) and net[3].bias.data.view(torch.int32)[:1].bitwise_xor_(1))"


@pytest.mark.nightly  # `test_throw_away.py` does so by day, of a script that also saves
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_script_is_found_to_be_the_same(tmp_path: Path, ranks) -> None:
    done = torchrun(*VERIFY, "--json", str(write_script(tmp_path)), ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert verdict["exit_status"] == 0 and verdict["first_difference"] is None
    assert verdict["steps"] == verdict["losses"] == 15 and verdict["finished_steps"] > 5
    assert ("adds in rank order" in verdict["text"]) == (ranks > 2)


@pytest.mark.nightly
def test_the_first_difference_is_named(tmp_path: Path) -> None:
    done = torchrun(*VERIFY, str(write_script(tmp_path, before_step=ONE_BIT)))
    assert done.returncode == 1
    # Step 7, or 8 where the parameter is still pending at 7.
    assert re.search("DIFFERENT from plain DDP: 3.bias before optimizer step [78];", done.stdout)
    assert "rank 1: DIFFERENT" in done.stderr
    assert "DIFFERENT" in torchruns_summary(done)


@pytest.mark.nightly
def test_a_script_that_does_not_repeat_itself_cannot_be_verified(tmp_path: Path) -> None:
    draws = "x.normal_(generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4), 'big')))"
    script = write_script(tmp_path, before_step=f"{draws}; ddp(x).sum().backward()")
    done = torchrun(*VERIFY, str(script))
    assert done.returncode != 0 and "the script does not repeat itself with plain DDP" in done.stdout


def test_a_script_without_ddp_cannot_be_verified(tmp_path: Path) -> None:
    done = python(*VERIFY, str(write_script(tmp_path, "print('nothing to see')")))
    assert (
        done.returncode == 2
        and "has trained no DDP model, or for too few steps (plain):\nnothing to see" in done.stderr
    )


def test_torchrun_ends_with_what_is_wrong(tmp_path: Path) -> None:
    done = torchrun("-m", "ddp_crossover", "verify", "--steps", "0", str(write_script(tmp_path)))
    assert done.returncode != 0 and "error: --steps must be at least 1" in torchruns_summary(done)


@pytest.mark.nightly
def test_a_run_too_short_for_the_pipeline_is_not_called_the_same(tmp_path: Path) -> None:
    done = torchrun("-m", "ddp_crossover", "verify", "--steps", "1", str(write_script(tmp_path)))
    assert done.returncode != 0 and "nothing went through the pipeline in 1 optimizer steps" in done.stdout


SPAWNS = """
import sys
import torch.multiprocessing as mp

def work(rank, port):
    sys.stdout.buffer.write(b"\\xff\\n")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    train()

if __name__ == "__main__":
    import socket
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(work, args=(port,), nprocs=2)
"""


@pytest.mark.nightly
def test_ranks_that_the_script_starts_by_itself_are_all_compared(tmp_path: Path) -> None:
    text = TRAIN.partition('if __name__ == "__main__"')[0].replace("def main", "def train")
    text = text.replace('    dist.init_process_group("gloo")\n', "") + SPAWNS
    done = python(*VERIFY, str(write_script(tmp_path, text)))
    assert done.returncode == 0 and "bit for bit" in done.stdout, done.stdout + done.stderr
    differs = python(*VERIFY, str(write_script(tmp_path, text, before_step=f"dist.get_rank() == 1 and {ONE_BIT}")))
    assert differs.returncode == 1 and "rank 1: DIFFERENT from plain DDP: 3.bias before" in differs.stderr
