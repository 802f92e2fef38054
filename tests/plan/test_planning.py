"""Planning on real ranks: its stages, what the ranks agree on, when plans change, and what they cost in memory."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from bench_parts.prediction import lasting
from ddp_crossover import cli
from ddp_crossover.comm.gloo_link import GlooLink
from ddp_crossover.dear import Phase
from ddp_crossover.fusion import FusionPlan, Schedule
from ddp_crossover.hook.plan_in_force import PlanInForce
from ddp_crossover.log import logger
from ddp_crossover.plan import session as planning
from ddp_crossover.plan.compute_profiler import ComputeProfiler
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel
from ddp_crossover.plan.model_profile import ModelProfile
from ddp_crossover.plan.session import Stage
from ddp_crossover.plan.tuned_file import TunedFileError
from heard import heard
from models import WideNet
from plans import judged_plans, random_plans

SETTLING = 4  # steps until DDP's buckets have settled
PROFILING = 6
TUNING = 136  # ten trials, six extensions of noisy ones, a run-off of four, two steps for each change of DDP's buckets


class Job:
    """A small training, to look into while it runs."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(5)
        self.ddp = DistributedDataParallel(WideNet(), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01, momentum=0.9)
        self.state = dx.attach(self.ddp, self.optimizer, **options)

    @property
    def planning(self) -> planning.Planning:
        return self.state._planning

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.ddp(torch.randn(2, 7)).square().mean().backward()
            self.optimizer.step()

    def train_until_settled(self) -> int:
        """Steps that it took; fails rather than goes on for ever."""
        for steps in range(1, SETTLING + PROFILING + TUNING + 5):
            self.train(1)
            if not self.state.tuning:
                return steps
        raise AssertionError(self.state.tuning_progress())


def stages(options: dict[str, Any]) -> tuple[list[tuple[Stage, int]], str]:
    """The stages of planning with how many steps each lasted, and what is said of them in the end."""
    seen: list[tuple[Stage, int]] = []
    with judged_plans(Schedule.AUTO):
        job = Job(**options)
        for _ in range(SETTLING + PROFILING + TUNING + 5):
            job.train(1)
            if job.state._reducer._in_force.pipeline is not None:
                stage, steps = seen.pop() if seen and seen[-1][0] is job.planning.stage else (job.planning.stage, 0)
                seen.append((stage, steps + 1))
    said = job.state.tuning_progress()
    assert not job.state.tuning
    job.state.detach()
    return seen, said


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [Stage.PROFILING, Stage.TUNING, Stage.SETTLED]),
        ({"tune": False}, [Stage.PROFILING, Stage.SETTLED]),
        ({"fusion_mb": 0.5}, [Stage.SETTLED]),
        ({"schedule": "dear"}, [Stage.SETTLED]),
        ({"schedule": "allreduce"}, []),
    ],
    ids=str,
)
def test_stages_follow_each_other_and_end(on_ranks, options, expected) -> None:
    for seen, said in on_ranks(stages, 2, options):
        assert [stage for stage, _ in seen] == expected
        lasted = dict(seen)
        assert lasted.get(Stage.PROFILING, PROFILING) <= PROFILING
        assert lasted.get(Stage.TUNING, TUNING) <= TUNING
        if Stage.TUNING in lasted:
            assert said.startswith("tuned: ") and "DDP as it was" in said and said.endswith(" ms exposed")
        elif options != {"schedule": "allreduce"}:
            assert said.startswith("not tuned: ")


@contextmanager
def _measures_differ() -> Iterator[None]:
    """Every rank measures other times, by more than any noise; a step is short beside what the link takes, also on a
    machine so busy that the tuner would leave DDP alone.
    """
    off = 1.0 + dist.get_rank()
    profile = ComputeProfiler.profile

    def other_profile(profiler: ComputeProfiler) -> ComputeProfile:
        return lasting(profile(profiler), off * 1e-3)

    with (
        mock.patch.object(planning, "probe_link", lambda *args: LinkModel(off * 1e-3, off * 1e-3, off * 1e-9)),
        mock.patch.object(ComputeProfiler, "profile", other_profile),
    ):
        yield


def _agreed() -> tuple[Any, ...]:
    """What every rank plans from and with."""
    digests = []
    use = PlanInForce._use

    def noting(in_force: PlanInForce, choice: Any) -> None:
        digests.append(choice.digest())
        use(in_force, choice)

    with _measures_differ(), mock.patch.object(PlanInForce, "_use", noting):
        job = Job()
        for _ in range(SETTLING + PROFILING + TUNING):
            job.train(1)
            time.sleep(2e-3 * dist.get_rank())
    plans = job.planning
    result = (plans.link_model, plans.compute, plans.result, digests)
    assert not job.state.tuning
    job.state.detach()
    return result


def test_all_ranks_plan_from_what_rank_0_has_measured_and_tune_alike(on_ranks) -> None:
    first, *others = on_ranks(_agreed, 3)
    link_model, compute, result, digests = first
    assert link_model == LinkModel(1e-3, 1e-3, 1e-9)
    assert compute.forward_s > 0 and result is not None and len(digests) > 3
    for other in others:
        assert other == first


def _switch_and_look(schedules: tuple[str, ...]) -> int:
    """Train under random plans; at each switch nothing may be under way. Returns the number of switches."""
    switches = 0
    use = PlanInForce._use

    def careful(in_force: PlanInForce, plan: FusionPlan) -> None:
        nonlocal switches
        before, link = in_force.pipeline, in_force._link
        assert isinstance(link, GlooLink)
        assert not link._context.open_legs
        switches += in_force._planning.has_begun
        if before is not None:
            assert before.phase is Phase.IDLE
            assert not before.updates
            assert all(slot.pending.current.resolved for slot in before.slots)
        use(in_force, plan)
        assert in_force.pipeline is None or in_force.pipeline is not before

    with random_plans(3, schedules=schedules), mock.patch.object(PlanInForce, "_use", careful):
        job = Job()
        job.train(25)
        stats = job.state.stats()
        assert stats.deferred_steps == stats.pipelined_iterations > 5  # under each new plan as under the first
        job.state.detach()
    return switches


def test_a_plan_changes_between_iterations_only(on_ranks) -> None:
    for switches in on_ranks(_switch_and_look, 2, ("dear", "auto", "allreduce")):
        assert switches > 5


def _memory_of_a_tuning_run() -> tuple[int, int, int]:
    """Bytes of the gradients; bytes of all fusion buffers that any plan had; bytes of receive memory in the end."""
    with judged_plans(Schedule.AUTO, best_mb=0.4):
        job = Job()
        arenas: list[torch.Tensor] = []  # kept, so that no memory is used twice by chance
        for _ in range(SETTLING + PROFILING + TUNING + 5):
            job.train(1)
            if job.state._reducer._in_force.pipeline is not None:
                arenas += job.state._reducer._in_force.pipeline.layout.arenas.values()
    gradients = sum(p.nbytes for p in job.ddp.parameters())
    job.state.synchronize()
    dist.barrier()
    free = [tensor for tensors in job.state._link._context.scratch._free.values() for tensor in tensors]
    assert len({choice.digest() for choice in job.planning.choices}) > 3
    job.state.detach()
    return gradients, _storage_bytes(arenas), _storage_bytes(free)


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_memory_of_a_tuning_run_is_that_of_one_plan(on_ranks) -> None:
    for gradients, arenas, scratch in on_ranks(_memory_of_a_tuning_run, 3):
        spare_bytes = 4 * 2**14
        assert arenas == 0  # gradients travel from DDP's buckets
        # All legs at once: from every peer what this rank owns, (n - 1) / n of the gradients.
        # Slots of earlier plans may be kept where they fit, so a busy machine needs a little more than one plan does.
        assert 0 < scratch <= gradients + spare_bytes


def _save_profile(path: str) -> tuple[bool, float]:
    job = Job(tune=False)
    none_yet = job.state.profile() is None
    job.train_until_settled()
    profile = job.state.profile()
    assert profile is not None
    if dist.get_rank() == 0:
        profile.save(Path(path))
    job.state.detach()
    return none_yet, profile.compute.compute_s


def test_a_measured_profile_feeds_the_simulator(on_ranks, tmp_path, capsys) -> None:
    file = tmp_path / "profile.json"
    (none_yet, compute_s), _ = on_ranks(_save_profile, 2, str(file))
    assert none_yet
    profile = ModelProfile.load(file)
    assert [spec.name for spec in profile.specs] == [name for name, _ in WideNet().named_parameters()]
    assert profile.world_size == 2 and profile.link is not None
    assert cli.main(["simulate", "--json", "--profile", str(file), "--world-sizes", "2,16"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compute_s"] == pytest.approx(compute_s)


class Tuned(NamedTuple):
    """What a run with a tuned file has done: steps until it settled, with which plan; what it has logged of tuning."""

    steps: int
    is_plain: bool
    digest: Any
    lines: list[str]


def _tune_with_file(path: str, favourite: str) -> Tuned:
    """Only rank 0 may touch the file."""
    mine = Path(path) if dist.get_rank() == 0 else Path(path).with_name("not readable.json")
    if dist.get_rank():
        mine.write_text("nothing that anybody could read")
    logger.setLevel(logging.INFO)
    try:
        with judged_plans(favourite), heard() as said:
            job = Job(tuned_file=mine)
            steps = job.train_until_settled()
            job.train(2)
    finally:
        logger.setLevel(logging.NOTSET)
    lines = [line for line in said if "tuned" in line]
    found = Tuned(steps, job.state.plan is None, job.planning.choices[-1].digest(), lines)
    job.state.detach()
    return found


# With the made-up times: 1 s for the favourite, 2 s for the other, and more for groups of another size than the best.
END_OF_TUNING = {
    Schedule.AUTO: r"tuned: \d+ ms a step instead of 2000 with DDP as it was \(\d\.\d\d times as fast\), "
    r"in groups of \S+ MiB; \S+ ms exposed",
    Schedule.ALLREDUCE: r"tuned: plain all-reduces, 1000 ms a step: groups of \S+ MiB( \(schedule dear\))? took "
    r"\d+ ms, which is no clear gain \(set fusion_mb to use the pipeline anyway\); \S+ ms exposed",
}


@pytest.mark.parametrize("favourite", END_OF_TUNING)
def test_what_one_run_has_tuned_is_said_once_and_the_next_one_finds_it(on_ranks, tmp_path, favourite) -> None:
    path = str(tmp_path / "tuned.json")
    first, other = on_ranks(_tune_with_file, 2, path, favourite)
    assert first[:3] == other[:3]
    assert first.steps > SETTLING + PROFILING + 12
    assert first.is_plain == (favourite == Schedule.ALLREDUCE)
    [line] = first.lines
    assert re.fullmatch(END_OF_TUNING[favourite], line) and other.lines == []
    # It would tune to the opposite now, if it tuned.
    opposite = Schedule.AUTO if favourite == Schedule.ALLREDUCE else Schedule.ALLREDUCE
    second, other = on_ranks(_tune_with_file, 2, path, opposite)
    assert second[:3] == other[:3]
    assert second.steps <= SETTLING + PROFILING
    assert second.is_plain == first.is_plain
    [line] = second.lines
    assert line.startswith("not tuned: ") and line.endswith(f", as stored in tuned_file {path}") and other.lines == []


def _attach_with_a_broken_file(path: str) -> None:
    mine = Path(path) if dist.get_rank() == 0 else Path(path).with_name("none here.json")
    with pytest.raises(TunedFileError, match=r"tuned\.json"):
        Job(tuned_file=mine)


def test_a_tuned_file_that_cannot_be_read_ends_every_rank_at_attach(on_ranks, tmp_path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text("nothing that anybody could read")
    on_ranks(_attach_with_a_broken_file, 2, str(path))


def _tune_without_a_place_to_keep_it(path: str) -> tuple[list[str], float]:
    """What was logged as a warning, and the group size in force afterwards."""
    with heard() as warnings, judged_plans(Schedule.AUTO):
        job = Job(tuned_file=path)
        job.train_until_settled()
        job.train(2)
    result = job.planning.result
    assert result is not None and job.state.plan is not None
    assert job.state.plan.fusion_mb == pytest.approx(result.best.fusion_mb)
    job.state.detach()
    return warnings, result.best.fusion_mb


def test_a_tuned_file_that_cannot_be_written_costs_a_warning(on_ranks, tmp_path) -> None:
    path = tmp_path / "no such directory" / "tuned.json"
    (warnings, best_mb), (silent, same_mb) = on_ranks(_tune_without_a_place_to_keep_it, 2, str(path))
    assert len(warnings) == 1 and path.parent.name in warnings[0]
    assert silent == [] and same_mb == best_mb
