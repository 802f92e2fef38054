"""How a run ends: what `step()` has asked for is in memory before anybody leaves, or none of it is.

Each rank is a script of its own, in an interpreter that ends as a user's does. Plain DDP is the measure for exit codes
and for what can be saved: its `step()` is over when it returns.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from script_server import Ended, ScriptServer

pytestmark = pytest.mark.launches

GROUP_TIMEOUT_S = 10.0
# From the last rank that can still do something until all have left, on a machine that does much else.
GRACE_S = 12.0

_TRAINING = """
import atexit, hashlib, os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import ddp_crossover as dx

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo",
    init_method=f"file://{os.getcwd()}/store",
    rank=rank,
    world_size=world_size,
    timeout=timedelta(seconds=float(os.environ["TIMEOUT_S"])),
)
torch.manual_seed(0)
net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
model = DistributedDataParallel(net, bucket_cap_mb=0.02)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
if os.environ["PLAIN"] != "yes":
    state = dx.attach(model, optimizer, fusion_mb=0.02)

def save():
    values = list(net.state_dict().values())
    for of_parameter in optimizer.state_dict()["state"].values():
        values += of_parameter.values()
    with open(f"saved{rank}", "a") as file:
        print(hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest(), file=file)

def train(steps=8, late_rank=0):
    for index in range(steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * index + rank))
        optimizer.zero_grad()
        if index == steps - 1 and rank == late_rank:
            time.sleep(0.5)  # the others have left their last step() before this one has sent anything
        model(x).square().mean().backward()
        optimizer.step()
"""


class Scripts:
    """Runs ends of a training script and says what they have saved."""

    def __init__(self, server: ScriptServer, directory: Path) -> None:
        self._server = server
        self._directory = directory

    def run(
        self, end: str, plain: bool = False, world_size: int = 2, timeout_s: float = GROUP_TIMEOUT_S
    ) -> tuple[list[Ended], list[list[str]]]:
        """How each rank has ended, and what it has saved."""
        directory = self._directory / f"run{len(list(self._directory.iterdir()))}"
        directory.mkdir()
        variables = {"PLAIN": "yes" if plain else "no", "TIMEOUT_S": str(timeout_s)}
        ends = self._server.run(_TRAINING + end, directory, world_size, timeout_s=timeout_s + 30, **variables)
        saved = [directory / f"saved{rank}" for rank in range(world_size)]
        return ends, [file.read_text().split() if file.exists() else [] for file in saved]


@pytest.fixture
def scripts(script_server: ScriptServer, tmp_path: Path) -> Scripts:
    """For one test."""
    return Scripts(script_server, tmp_path)


# Everybody can give everybody what `step()` has asked for.
ENDS = {
    "normal": "train()",
    "saved": "train(); save()",
    "exception": "train()\nif rank: raise ZeroDivisionError('my own')\nsave()",
    "exception_everywhere": "train()\nraise ZeroDivisionError('my own')",
    "exception_saved_on_the_way": "try:\n    train(); raise ZeroDivisionError('my own')\nfinally:\n    save()",
    "saved_by_an_excepthook": "sys.excepthook = lambda *_: save()\ntrain()\nif rank: raise ZeroDivisionError\nsave()",
    "sys_exit": "train()\nif rank: sys.exit(3)\nsave()",
    "destroyed_first": "train(); dist.destroy_process_group(); save()",
    "destroyed_and_left": "train(); dist.destroy_process_group()",
    "destroyed_by_one": "train()\nif rank: dist.destroy_process_group()\nsave()",
    "saved_then_destroyed": "train(); save(); dist.destroy_process_group()",
    "saved_at_exit": "atexit.register(save); train()",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_script_ends_as_with_plain_ddp_and_has_saved_the_last_step(scripts, end) -> None:
    expected, expected_saves = scripts.run(end, plain=True)
    ends, saves = scripts.run(end)
    assert [one.exitcode for one in ends] == [one.exitcode for one in expected], ends
    assert saves == expected_saves


# Rank 1 takes with it what the others need.
LOST = {
    "killed": "train(late_rank=1)\nif rank: os.kill(os.getpid(), signal.SIGKILL)\nsave()",
    "os_exit": "train(late_rank=1)\nif rank: os._exit(0)\nsave()",
    "killed_and_seen_late": "train(late_rank=1)\nif rank: os._exit(0)\ntime.sleep(0.7); save()",
    "evaluated": "train(late_rank=1)\nif rank: os._exit(0)\nwith torch.no_grad(): model.module(torch.ones(64))\nsave()",
    "optimizer_first": "train(late_rank=1)\nif rank: os._exit(0)\noptimizer.state_dict(); save()",
}

# Rank 1 sends all that it owes of the last step but the group that a state dict reads last, and is lost.
LOST["but_for_one_group"] = """
train(7)
state.synchronize()
dist.barrier()
if rank:
    from ddp_crossover.comm.gloo_leg import GlooGatherLeg
    post, posted = GlooGatherLeg.post, []
    def post_all_but_the_first(leg):
        posted.append(leg.group)
        if leg.group:
            post(leg)
        if len(posted) == len(state.plan.groups):
            time.sleep(0.5)  # what was sent arrives
            os._exit(0)
    GlooGatherLeg.post = post_all_but_the_first
x = torch.randn(4, 64, generator=torch.Generator().manual_seed(70 + rank))
optimizer.zero_grad()
model(x).square().mean().backward()
optimizer.step()
time.sleep(2.0 * rank)
save()
"""


@pytest.mark.parametrize("end", LOST.values(), ids=LOST)
def test_a_checkpoint_after_a_peer_was_lost_is_of_one_step(scripts, end) -> None:
    """That of the last step if it got so far, else that of the step before: never parts of both."""
    _, [[after, *_], _] = scripts.run("train(); save()", plain=True)
    _, [[before, *_], _] = scripts.run("train(7); save()", plain=True)
    [one, lost], [saved, _] = scripts.run(end)
    assert lost.exitcode in (0, -9), lost
    assert one.exitcode == 0, one
    assert saved in ([after], [before])
    assert ("was taken back" in one.output) == (saved == [before]), one


# Rank 1 sends nothing of the last step. Rank 0 finds out in a forward.
_FAILS_IN_FORWARD = """
train(7)
state.synchronize()
dist.barrier()
if rank:
    from ddp_crossover.comm.gloo_leg import GlooGatherLeg
    GlooGatherLeg.post = lambda leg: None
train(1)
if rank:
    time.sleep(0.5)  # its part of the sums arrives
    os._exit(0)
try:
    model(torch.ones(64))
except RuntimeError:
    save()
"""


def test_a_script_that_catches_the_error_of_a_forward_saves_the_step_before(scripts) -> None:
    _, [[before, *_], _] = scripts.run("train(7); save()", plain=True)
    [one, _], [saved, _] = scripts.run(_FAILS_IN_FORWARD)
    assert one.exitcode == 0, one
    assert saved == [before]
    assert "was taken back" in one.output, one


def test_after_a_step_was_taken_back_nothing_trains_on(scripts) -> None:
    end = "train(late_rank=1)\nif rank: os._exit(0)\nsave()\ntry:\n    train(1)\nfinally:\n    save()"
    [one, _], [saved, _] = scripts.run(end)
    assert one.exitcode == 1, one
    assert saved[0] == saved[1]
    if "was taken back" in one.output:
        assert "StaleParameterError: the last optimizer.step() was taken back, because rank 0: the" in one.output


# Rank 1 sends its last layers' gradients, and ends in the middle of its last backward.
_PARTLY = """
def leave(gradient):
    time.sleep(1.0)
    os._exit(0)

train(7)
if rank:
    net[6].weight.register_hook(leave)
else:
    optimizer.register_step_pre_hook(lambda *_: print(net[10].weight.grad.sum()))
try:
    train(1)
finally:
    save()
"""


def test_a_step_that_is_in_memory_in_part_is_not_saved(scripts) -> None:
    """A gradient was looked at before `step()`, so its update is in memory, and the others will never be."""
    [one, _], [saved, _] = scripts.run(_PARTLY)
    assert one.exitcode == 1, one
    assert "LegError" in one.output
    assert not saved


# Rank 1 sends all but the group of the last layers, whose optimizer has put its update off; the other's is in memory.
_ONE_OPTIMIZER_OF_TWO = """
state.detach()
late, optimizer = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (net[8:], net[:8])]
state = dx.attach(model, [late, optimizer], fusion_mb=0.02)

def train_both(index):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * index + rank))
    net.zero_grad()
    model(x).square().mean().backward()
    late.step()
    if index == 7:
        print([parameter.grad.sum() for parameter in net[:8].parameters()])
    optimizer.step()

for index in range(7):
    train_both(index)
state.synchronize()
dist.barrier()
if rank:
    from ddp_crossover.comm.gloo_leg import GlooGatherLeg
    post = GlooGatherLeg.post
    GlooGatherLeg.post = lambda leg: post(leg) if leg.group else None
train_both(7)
print("both have stepped", flush=True)
if rank:
    time.sleep(0.5)  # what was sent arrives
    os._exit(0)
save()
"""


def test_two_optimizers_of_which_one_has_made_its_step_are_not_saved(scripts) -> None:
    [one, _], [saved, _] = scripts.run(_ONE_OPTIMIZER_OF_TWO)
    assert "both have stepped" in one.output, one
    assert one.exitcode == 1 and "LegError" in one.output, one
    assert not saved


def test_with_three_ranks_the_others_leave_in_time(scripts) -> None:
    end = "train(late_rank=1)\nif rank == 1: os._exit(0)\nsave()\nif rank: raise ZeroDivisionError('my own')"
    ends, saves = scripts.run(end, world_size=3)
    assert [one.exitcode for one in ends] == [0, 0, 1], ends
    assert [len(saved) for saved in saves] == [1, 0, 1]
    assert all(one.seconds < GROUP_TIMEOUT_S + GRACE_S for one in ends), ends
