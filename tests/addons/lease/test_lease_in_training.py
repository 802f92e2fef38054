"""Training takes turns by itself, and whatever becomes of the lease, the parameters are the same bits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_crossover as dx
from ddp_crossover.plan.tuner import TRIAL_STEPS
from ddp_crossover.report.spans import LEASE_KINDS
from lease_processes import Actor, LeaseProcesses
from lease_training import Job, make_lease, same, train
from models import DeepNet
from plans import judged_plans

STEPS = 25
LATE_S = 0.02


def contenders(processes: LeaseProcesses, seconds: float, **options: Any) -> list[Actor]:
    """A job that wants both ranks' devices all the time."""
    actors = [processes.actor("other", resource=f"cpu:{rank}", **options) for rank in range(2)]
    for actor in actors:
        actor.start("take_turns", seconds, 0.003, 0.0005)
    return actors


@pytest.mark.parametrize("schedule", ["dear", "allreduce"])
def test_with_another_job_the_parameters_are_the_same_bits_and_both_get_on(
    on_ranks, processes: LeaseProcesses, lease_directory: Path, schedule: str
) -> None:
    processes.broker()
    run = partial(train, schedule=schedule)
    expected = on_ranks(run, 2, None, STEPS, LATE_S)
    actors = contenders(processes, 2.5)
    seen = on_ranks(run, 2, str(lease_directory), STEPS, LATE_S)
    for (parameters, stats), (plain, _) in zip(seen, expected, strict=True):
        assert same(parameters, plain)
        assert stats.lease.grants > STEPS / 3  # some steps are without it, to compare
        assert stats.lease.unleased == {}
    # Rank 0 waits for rank 1 in each step, and that is another job's turn.
    lease = seen[0][1].lease
    assert lease.gaps > STEPS / 4
    assert lease.given_s > lease.gaps * LATE_S / 4
    assert 0 < lease.filled_s <= lease.given_s
    assert all(sum(hold["leased"] for hold in actor.result()) > STEPS for actor in actors)


def test_where_nobody_waits_no_gap_is_given(on_ranks, processes: LeaseProcesses, lease_directory: Path) -> None:
    processes.broker()
    for _, stats in on_ranks(train, 2, str(lease_directory), STEPS, LATE_S):
        lease = stats.lease
        assert (lease.gaps, lease.given_s, lease.filled_s, lease.predicted_s, lease.hand_offs) == (0, 0, 0, 0, 0)
        assert lease.gain is None and lease.sharing
        # One turn a step, and some more while plans are made.
        assert STEPS <= lease.grants < 2 * STEPS
        assert 0 < lease.held_s < stats.elapsed_s + 1


class Watched(nn.Module):
    """Notes whether the lease is held when its forward, and its backward, run. DDP broadcasts its buffers."""

    def __init__(self, lease: dx.GpuLease) -> None:
        super().__init__()
        self.lease = [lease]  # no attribute of a module that torch looks into
        self.net = DeepNet()
        self.norm = nn.BatchNorm1d(5)
        self.seen: list[tuple[str, bool]] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.net(x))
        self.seen.append(("forward", self.lease[0].holding))
        if self.fails:
            raise ValueError("as asked for")
        if y.requires_grad:
            y.register_hook(lambda _: self.seen.append(("backward", self.lease[0].holding)))
        return y


@contextmanager
def watched_collectives(lease: dx.GpuLease, seen: list[bool]) -> Iterator[None]:
    """Note whether the lease is held at collectives that the training thread blocks on."""
    original = {name: getattr(dist, name) for name in ("all_gather", "_broadcast_coalesced")}

    def spy(name: str, *args: Any, **kwargs: Any) -> Any:
        seen.append(lease.holding)
        return original[name](*args, **kwargs)

    for name in original:
        setattr(dist, name, partial(spy, name))
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(dist, name, function)


def where_it_is_held(directory: str) -> dict[str, Any]:
    lease = make_lease(directory)
    model = Watched(lease)
    collectives: list[bool] = []
    held: dict[str, list[bool]] = {}
    with watched_collectives(lease, collectives):
        job = Job(lease, model, fusion_mb=None, tune=True)

        def note(where: str) -> None:
            held.setdefault(where, []).append(lease.holding)

        for _ in range(30):
            job.optimizer.zero_grad()
            note("before forward")
            output = job.ddp(job.batch())
            note("before backward")
            output.square().mean().backward()
            job.state.clip_grad_norm_(1.0)
            job.optimizer.step()
            note("after step")
        model.eval()
        with torch.no_grad():
            job.ddp(job.batch())
        note("after evaluation")
        job.ddp(job.batch())
        note("after evaluation")
        model.train()
        with job.ddp.no_sync():
            job.ddp(job.batch()).sum().backward()
        note("after backward without sync")
        job.ddp.module(job.batch())
        note("after a forward without DDP")
        model.fails = True
        with suppress(ValueError):
            job.ddp(job.batch())
        note("after a forward that raised")
        model.fails = False
        job.ddp(job.batch())
        job.ddp(job.batch())  # broadcasts buffers while the first one's turn lasts
        job.state.synchronize()
        note("after synchronize")
        job.ddp(job.batch())
        job.state.detach()
        note("after detach")
        job.ddp(job.batch())
        note("after a forward without DearState")
    lease.close()
    return {"held": held, "model": model.seen, "collectives": collectives}


def test_it_is_held_while_compute_runs_and_nowhere_else(
    on_ranks, processes: LeaseProcesses, lease_directory: Path
) -> None:
    processes.broker()
    for seen in on_ranks(where_it_is_held, 2, str(lease_directory)):
        held = seen["held"]
        assert all(held.pop("before backward"))
        assert {where: any(values) for where, values in held.items()} == dict.fromkeys(held, False)
        # The last ones are without DDP, and without DearState.
        in_training = seen["model"][:60]
        assert {kind for kind, _ in in_training} == {"forward", "backward"}
        assert all(is_held for _, is_held in in_training)
        assert len(seen["collectives"]) > 30
        assert not any(seen["collectives"])


def test_brokers_that_are_killed_during_training_change_nothing(
    on_ranks, processes: LeaseProcesses, lease_directory: Path
) -> None:
    steps = 150
    expected = on_ranks(train, 2, None, steps, 0.004)
    over = threading.Event()
    kills: list[float] = []

    def kill_brokers() -> None:
        while not over.is_set():
            over.wait(0.1)
            with suppress(OSError):  # there is none at the moment
                os.kill(processes.status()["pid"], signal.SIGKILL)
                kills.append(time.monotonic())

    killer = threading.Thread(target=kill_brokers)
    killer.start()
    try:
        actors = contenders(processes, 2.0, spawn_broker=True)
        seen = on_ranks(train, 2, str(lease_directory), steps, 0.004)
    finally:
        over.set()
        killer.join()
    assert len(kills) > 3
    for (parameters, stats), (plain, _) in zip(seen, expected, strict=True):
        assert same(parameters, plain)
        assert stats.iterations == steps
        assert stats.lease.lost or stats.lease.unleased
        assert stats.lease.grants
    for actor in actors:
        actor.result()


def test_a_job_that_is_stopped_while_it_holds_does_not_stop_training(
    on_ranks, processes: LeaseProcesses, lease_directory: Path
) -> None:
    processes.broker()
    expected = on_ranks(train, 2, None, 10)
    other = processes.actor("other", resource="cpu:0")
    other.call("acquire")
    other.signal(signal.SIGSTOP)
    seen = on_ranks(train, 2, str(lease_directory), 10)
    other.signal(signal.SIGCONT)
    for (parameters, stats), (plain, _) in zip(seen, expected, strict=True):
        assert same(parameters, plain)
        # The broker has taken it from the stopped job, long before training would have gone on without.
        assert stats.lease.unleased == {} and stats.lease.grants >= 10
    assert not other.call("get", "holding")


def train_without_gaps(directory: str, steps: int) -> Any:
    lease = make_lease(directory)
    job = Job(lease)
    for _ in range(steps):
        job.step()
        time.sleep(0.001)
    stats = job.state.stats()
    held = lease.holding
    job.end()
    return stats, held


def test_where_sharing_gains_nothing_it_takes_a_break_and_says_so(
    on_ranks, processes: LeaseProcesses, lease_directory: Path
) -> None:
    processes.broker()
    # It computes nothing, so without the lease it is in nobody's way, and each of its turns is longer than a step.
    processes.actor("other", resource="cpu:0").start("take_turns", 20.0, 0.03, 0.0005)
    # A single rank waits for nobody: it has nothing to give.
    [(stats, held)] = on_ranks(train_without_gaps, 1, str(lease_directory), 60)
    assert not stats.lease.sharing and stats.lease.gain < 0.02
    assert any("takes a break" in reason for reason in stats.fallbacks)
    assert stats.lease.grants < 60
    assert not held


def steps_until_tuned(directory: str, disturbed: bool) -> int:
    with judged_plans("auto"):
        job = Job(make_lease(directory), fusion_mb=None)
        steps = 0
        while job.state.tuning:
            if disturbed and dist.get_rank() == 0:
                job.state._parts.turns.ledger.disturbances += 1
            job.step()
            steps += 1
    job.end()
    return steps


def test_trials_in_which_another_job_was_in_the_way_are_run_again_but_not_for_ever(
    on_ranks, processes: LeaseProcesses, lease_directory: Path
) -> None:
    processes.broker()
    quiet, disturbed = (on_ranks(steps_until_tuned, 2, str(lease_directory), was) for was in (False, True))
    assert disturbed == [steps + 5 * TRIAL_STEPS for steps in quiet]


def traced(directory: str, path: str) -> Any:
    job = Job(make_lease(directory))
    late_s = LATE_S if dist.get_rank() == 1 else 0.0
    for _ in range(6):
        job.step(late_s)
    with job.state.trace() as trace:
        for _ in range(8):
            job.step(late_s)
    file = Path(path) / f"rank{dist.get_rank()}.json"
    trace.save(file)
    job.end()
    return trace.spans(), dx.Trace.load(file).spans(*LEASE_KINDS)


def test_turns_are_a_row_of_the_trace(on_ranks, processes: LeaseProcesses, lease_directory: Path, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from ddp_crossover.report.timeline import draw

    processes.broker()
    contenders(processes, 8.0)
    results = on_ranks(traced, 2, str(lease_directory), str(tmp_path))
    for spans, loaded in results:
        lease = [span for span in spans if span.kind in LEASE_KINDS]
        assert {span.detail for span in lease} == {"training"}
        assert {"held", "lease_wait"} <= {span.kind for span in lease}
        # One after the other: a turn, a gap, the wait for the next turn.
        assert all(a.end_s <= b.begin_s for a, b in pairwise(lease))
        assert [span.kind for span in loaded] == [span.kind for span in lease]
    gaps = [span for span in results[0][0] if span.kind == "gap"]
    waits = [span for span in results[0][0] if span.kind == "wait"]
    assert gaps
    # A gap may last beyond the wait in which it begins: forward is held until it runs through.
    assert any(w.begin_s <= g.begin_s <= w.end_s for w in waits for g in gaps)
    draw([dx.Trace.load(tmp_path / f"rank{rank}.json") for rank in range(2)], tmp_path / "lease.png")
    assert '"lease of training"' in (tmp_path / "rank0.json").read_text()


def refused() -> str:
    with pytest.raises(TypeError) as error:
        Job("a string")  # type: ignore[arg-type]
    return str(error.value)


def test_what_is_no_lease_is_refused(on_ranks) -> None:
    assert on_ranks(refused, 1) == ["lease must be a ddp_crossover.GpuLease, got str"]
