"""Measures jobs that share a simulated GPU: each alone, then all at once in every way to share it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bench_kit.rounds import spread
from sim_lease_parts.broker import Broker, SimLease
from sim_lease_parts.gpu import Sharing
from sim_lease_parts.jobs import Filler, Training
from sim_lease_parts.models import Model
from sim_lease_parts.seam import World

# Jobs compare steps with the lease and without it meanwhile, and begin breaks.
SETTLE_STEPS = 90
_ALONE_SETTLE_STEPS, _ALONE_STEPS = 5, 20

# In turns in each round: kernels of NCCL, which wait on the GPU, or legs of gloo, which do not.
ARMS = {
    "NCCL": (False, Sharing()),
    "NCCL, lease": (True, Sharing()),
    "NCCL, MPS": (False, Sharing(mps=True)),
    "NCCL, MPS, lease": (True, Sharing(mps=True)),
    "gloo": (False, Sharing(legs_on_host=True)),
    "gloo, lease": (True, Sharing(legs_on_host=True)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Some jobs that share a GPU.

    Attributes:
        model: what training jobs train.
        all_reduce_s: what all gradients take on the wire of each job.
        trainings: how many of them there are.
        has_filler: whether a filler is there, too.
    """

    model: Model
    all_reduce_s: float
    trainings: int
    has_filler: bool = False

    @property
    def name(self) -> str:
        jobs = f"{self.trainings} jobs" if self.trainings > 1 else "1 job"
        return f"{self.model.name}, A {self.all_reduce_s * 1e3:.0f} ms, {jobs}{' + filler' if self.has_filler else ''}"


def measure(
    case: Case,
    rounds: int,
    window_steps: int,
    settle_steps: int = SETTLE_STEPS,
    arms: Mapping[str, tuple[bool, Sharing]] = ARMS,
) -> dict[str, Any]:
    """All arms of a case, in rounds that differ in their jitter; steps are as long as those of a job alone."""
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    alone_s = []
    longest_s = max(case.model.compute_s, case.all_reduce_s, case.model.host_s + case.model.between_s)
    settle_alone_s, window_alone_s = _ALONE_SETTLE_STEPS * longest_s, _ALONE_STEPS * longest_s
    for seed in range(rounds):
        alone = _run(
            dataclasses.replace(case, trainings=1, has_filler=False),
            Sharing(),
            False,
            (settle_alone_s, window_alone_s),
            seed,
        )
        [steps_per_s] = alone["steps_per_s"]
        alone_s.append(1 / steps_per_s)
        idle_s = 1 / steps_per_s - alone["computed_s"][0] / steps_per_s
        for arm, (is_leased, sharing) in arms.items():
            together = _run(case, sharing, is_leased, (settle_steps / steps_per_s, window_steps / steps_per_s), seed)
            speeds = [rate / steps_per_s for rate in together["steps_per_s"]]
            figures: dict[str, Any] = {"speeds": speeds, "together": sum(speeds), "lease": together["lease"]}
            if case.has_filler:
                # Of the device time that the main job leaves when it is alone.
                figures["idle_filled"] = together["filled_s"] / (idle_s * steps_per_s)
                figures["filler"] = together["filled_s"]
            found[arm].append(figures)
    return {
        "case": case.name,
        "compute_s": case.model.compute_s,
        "alone_s": spread(alone_s),
        "arms": {arm: _over_rounds(of_rounds) for arm, of_rounds in found.items()},
        "rounds": found,
    }


def _over_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    figures = {
        key: spread([one[key] for one in rounds]) for key in ("together", "idle_filled", "filler") if key in rounds[0]
    }
    return figures | {"main": spread([one["speeds"][0] for one in rounds])}


def _run(case: Case, sharing: Sharing, is_leased: bool, lasts_s: tuple[float, float], seed: int) -> dict[str, Any]:
    """Steps per second of the training jobs, and for how much of each second the GPU computed for each and a filler."""
    settle_s, window_s = lasts_s
    world = World(sharing)
    broker = Broker(world)
    end_s = settle_s + window_s
    leases: list[SimLease] = []

    def lease(name: str, role: Any) -> SimLease | None:
        if is_leased:
            leases.append(SimLease(broker, name, role))
        return leases[-1] if is_leased else None

    trainings = [
        Training(world, f"job-{number}", case.model, case.all_reduce_s, lease(f"job-{number}", "peer"), seed)
        for number in range(case.trainings)
    ]
    filler = Filler(world, lease("filler", "filler")) if case.has_filler else None
    jobs: list[Training | Filler] = [*trainings, *([filler] if filler is not None else [])]

    def run(job: Training | Filler) -> None:
        job.run(end_s)
        if job.lease is not None:
            job.lease.release()
            job.lease.close()

    with world.in_place():
        world.hosts.run(*(partial(run, job) for job in jobs), *(lease.watch for lease in leases))
    shares = [job.computed_in(settle_s, end_s) for job in jobs]
    return {
        "steps_per_s": [rate(job.ended_s, settle_s, end_s) for job in trainings],
        "computed_s": shares,
        "filled_s": shares[-1] if filler is not None else 0.0,
        "lease": [dataclasses.asdict(job.turns.stats()) if is_leased else {} for job in trainings],
    }


def rate(ended_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Steps per second between two moments."""
    inside = [time_s for time_s in ended_s if begin_s <= time_s <= end_s]
    return (len(inside) - 1) / (inside[-1] - inside[0])
