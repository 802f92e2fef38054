"""What the doctor finds out inside of a script: the times of its steps, and the figures of what was attached to."""

from __future__ import annotations

import itertools
import time
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.addons.launch.auto import AttachedModel, Auto
from ddp_crossover.addons.launch.errand import Errand
from ddp_crossover.addons.launch.recording import Models, Recording, digests
from ddp_crossover.hook.plan_in_force import NOT_FASTER
from ddp_crossover.moments import Follower
from ddp_crossover.torch_internals.ddp import bucket_cap_bytes

# Allocators, caches, iterations that are not pipelined yet or from which the plan is made.
_WARMUP_STEPS = 14
FEWEST_STEPS = 18


class Examination(Follower):
    """Times the steps of the first optimizer that makes one.

    Args:
        errand: of the process, with at least ``FEWEST_STEPS``.
        auto: what has been attached to; None if plain DDP is timed.
    """

    def __init__(self, errand: Errand, auto: Auto | None) -> None:
        self._recording = Recording(errand, self._content)
        self._auto = auto
        self._first: Optimizer | None = None
        self._ends_s: list[float] = []
        self._bucket_cap_mb: float | None = None

    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        """Take note of a model that is trained, and of the first one's buckets as the script has set them."""
        self._recording.note_model(ddp)
        if self._bucket_cap_mb is None:
            self._bucket_cap_mb = bucket_cap_bytes(ddp) / 2**20

    def step_ends(self, optimizer: Optimizer) -> None:
        self._first = self._first or optimizer
        if optimizer is self._first:
            self._ends_s.append(time.perf_counter())
            self._recording.note_steps(len(self._ends_s))

    def _content(self, models: Models) -> dict[str, Any] | None:
        if len(self._ends_s) < FEWEST_STEPS:
            return None
        ends_s = self._ends_s[_WARMUP_STEPS:]
        return {
            "steps_s": [after - before for before, after in itertools.pairwise(ends_s)],
            "bucket_cap_mb": self._bucket_cap_mb,
            "models": [] if self._auto is None else [self._about(model) for model in self._auto.models],
            "parameters": digests("named_parameters", models),
        }

    def _about(self, model: AttachedModel) -> dict[str, Any]:
        """The figures of a model, with the profile beside them."""
        figures, state = model.figures(), model.state
        profile = None if state is None else state.profile()
        why = None if state is None else state.tuning_progress()
        if profile is not None:
            profile.save(self._recording.path.with_suffix(".profile"))
        # That a plan was not worth it is no fault of the script, and what the verdict is about.
        obstacles = {what: times for what, times in figures["obstacles"].items() if what not in (NOT_FASTER, why)}
        return figures | {
            "obstacles": obstacles,
            "has_profile": profile is not None,
            "is_tuned": state is not None and state.tuning,
            "why": why,
        }
