"""Plans for tests: drawn at random, or found by the real tuner from step times that a test has made up.

A plan is allowed to be slow, never wrong, so `RandomPlanning` makes plans that nobody would make and changes them in
the middle of training. `JudgedPlanning` is the real planning, but for the clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from ddp_crossover import composition
from ddp_crossover.fusion import MB, FusionPlan, Schedule
from ddp_crossover.plan.compute_profiler import Stopwatch
from ddp_crossover.plan.cutting import plan_fusion
from ddp_crossover.plan.search import TAPERS, PlannedStep
from ddp_crossover.plan.session import Orders, Planning, Stage
from ddp_crossover.plan.trial_timer import TrialTimer
from ddp_crossover.plan.trials import Candidate

AS_BUILT = "as built"  # a favourite: DDP as it was before attach


class RandomPlanning(Planning):
    """Draws plans from a seed that all ranks share; the ranks compare them as they compare all plans.

    Some of those that are plain all-reduces want DDP's buckets as they were before attach.

    Attributes:
        choices: what was chosen so far.
    """

    def __init__(self, *args: Any, seed: int, schedules: tuple[str, ...] = tuple(Schedule)) -> None:
        super().__init__(*args)
        self._draw = random.Random(seed)
        self._schedules = schedules
        self.choices: list[FusionPlan] = []

    def measure_link(self) -> None:
        """Not needed."""

    def why_not_at_all(self) -> str | None:
        """Nothing is: random plans are for one rank, too."""
        return None

    def begin(self, orders: Orders) -> FusionPlan:
        self._orders = Orders(*self._exchange(orders)[0])
        self.stage = Stage.TUNING  # else DDP would be left alone once it has its own buckets
        return self._chosen()

    def at_step_boundary(self) -> FusionPlan | None:
        return self._chosen() if self._draw.random() < 0.4 else None

    def _chosen(self) -> FusionPlan:
        self.choices.append(self._checked(self._plan_at_random(Schedule(self._draw.choice(self._schedules)))))
        self.takes_buckets_as_built = self.choices[-1].schedule is Schedule.ALLREDUCE and self._draw.random() < 0.5
        return self.choices[-1]

    def _plan_at_random(self, schedule: Schedule) -> FusionPlan:
        draw = self._draw
        use_rank = list(self._orders.use_rank)
        if draw.random() < 0.5:
            draw.shuffle(use_rank)  # only speed hangs on it
        plan = plan_fusion(
            self.specs,
            self._orders.arrival,
            use_rank,
            world_size=self._link.world_size,
            fusion_mb=self._model_bytes / MB / 2 ** draw.uniform(0, 7),
            taper=draw.choice(TAPERS),
            shard_align_bytes=self._link.shard_align_bytes,
        )
        if self._link.has_fused_all_reduce:
            plan = replace(plan, groups=tuple(replace(g, split=draw.random() < 0.6) for g in plan.groups))
        return replace(plan, schedule=schedule, launch_order=random_launch_order(plan, draw))


class _Judge(Stopwatch):
    """Tells the tuner what a test has made up; measures compute as always."""

    def __init__(self, planning: JudgedPlanning) -> None:
        super().__init__(torch.device("cpu"))
        self._planning = planning

    def seconds(self, marks: Sequence[Any], *, waits: bool) -> list[float]:
        if not waits:
            return super().seconds(marks, waits=waits)
        step_s = self._planning.made_up_step_s()
        return [step_s * number for number in range(len(marks))]


class JudgedPlanning(Planning):
    """The real stages, with made-up step times for the tuner, in which one schedule wins by a wide margin.

    Attributes:
        choices: what was chosen so far.
    """

    def __init__(self, *args: Any, favourite: str, best_mb: float = 1.0) -> None:
        super().__init__(*args)
        self._favourite = favourite
        self._best_mb = best_mb
        self._timer = TrialTimer(self._link, self._device, self._others, _Judge(self))
        self.choices: list[FusionPlan] = []

    def _best_predicted(self, planned: PlannedStep) -> Candidate:
        """Never to leave DDP alone at once, as on a machine on which compute is slow."""
        predicted = super()._best_predicted(planned)
        return Candidate(predicted.fusion_mb) if predicted.as_built else predicted

    def made_up_step_s(self) -> float:
        assert self._tuner is not None
        candidate = self._tuner.candidate
        step_s = 1.0 if (AS_BUILT if candidate.as_built else candidate.schedule) == self._favourite else 2.0
        if candidate.schedule is Schedule.AUTO:
            step_s += 0.2 * abs(math.log2(candidate.fusion_mb / self._best_mb))
        return step_s

    def begin(self, orders: Orders) -> FusionPlan:
        return self._noted(super().begin(orders))

    def at_step_boundary(self) -> FusionPlan | None:
        choice = super().at_step_boundary()
        return None if choice is None else self._noted(choice)

    def _noted(self, choice: FusionPlan) -> FusionPlan:
        self.choices.append(choice)
        return choice


class TurningPlainPlanning(Planning):
    """Plans as always, and takes plain all-reduces from a certain step on."""

    def __init__(self, *args: Any, after_steps: int) -> None:
        super().__init__(*args)
        self._steps_left = after_steps

    def begin(self, orders: Orders) -> FusionPlan:
        self._first_plan = super().begin(orders)
        return self._first_plan

    def at_step_boundary(self) -> FusionPlan | None:
        self._steps_left -= 1
        return None if self._steps_left else replace(self._first_plan, schedule=Schedule.ALLREDUCE)


def random_launch_order(plan: FusionPlan, draw: random.Random) -> tuple[tuple[str, int], ...]:
    """Groups as they arrive; gather legs anywhere behind their scatter legs."""
    order = [("scatter" if group.split else "all_reduce", group.index) for group in plan.groups]
    for group in plan.groups:
        if group.split:
            behind = order.index(("scatter", group.index)) + 1
            order.insert(draw.randint(behind, len(order)), ("gather", group.index))
    return tuple(order)


@contextmanager
def random_plans(seed: int, **options: Any) -> Iterator[None]:
    """Whatever is attached within it trains under random plans."""
    with mock.patch.object(composition, "Planning", partial(RandomPlanning, seed=seed, **options)):
        yield


@contextmanager
def plain_after(steps: int) -> Iterator[None]:
    """Whatever is attached within it changes to plain all-reduces, this many steps after the first plan."""
    with mock.patch.object(composition, "Planning", partial(TurningPlainPlanning, after_steps=steps)):
        yield


@contextmanager
def judged_plans(favourite: str, **options: Any) -> Iterator[None]:
    """Whatever is attached within it tunes itself, and ends with `favourite`, a schedule."""
    with mock.patch.object(composition, "Planning", partial(JudgedPlanning, favourite=favourite, **options)):
        yield
