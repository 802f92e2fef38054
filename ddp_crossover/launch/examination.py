"""Examines a script from the inside: runs it for some steps, then writes down what the doctor needs, and ends it."""

from __future__ import annotations

import atexit
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_crossover.ddp.plan_in_force import NOT_FASTER
from ddp_crossover.ddp.unwrapping import live_objects
from ddp_crossover.launch.auto import Auto
from ddp_crossover.launch.ending import Ending
from ddp_crossover.launch.synchronized import parameter_digests
from ddp_crossover.torch_internals.ddp import bucket_cap_bytes

# Allocators, caches, iterations that are not pipelined yet or from which the plan is made.
_WARMUP_STEPS = 14
FEWEST_STEPS = 18


class Examination:
    """Times steps, and ends the script after some.

    Args:
        folder: where each rank writes what was found.
        steps: number of steps of an optimizer, at least ``FEWEST_STEPS``.
        auto: what has been attached to; nothing if plain DDP is timed.
        figures: returns the figures of what has been attached to.
    """

    def __init__(self, folder: Path, steps: int, auto: Auto, figures: Callable[[], list[dict[str, Any]]]) -> None:
        self._path = folder / f"{dist.get_rank()}.json"
        self._ending = Ending(folder, steps, self._write)
        self._auto, self._figures = auto, figures
        self._first: Optimizer | None = None
        self._ends_s: list[float] = []
        self._models: list[DistributedDataParallel] = []
        self._bucket_cap_mb: float | None = None
        self._is_written = False
        register_optimizer_step_post_hook(self._after_step)
        atexit.register(self._write)

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Take note of a model that is trained, and of the first one's buckets as the script has set them."""
        if not any(ddp is model for model in self._models):
            self._models.append(ddp)
        if self._bucket_cap_mb is None:
            self._bucket_cap_mb = bucket_cap_bytes(ddp) / 2**20

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._first = self._first or optimizer
        if optimizer is self._first:
            self._ends_s.append(time.perf_counter())
            self._ending.note(len(self._ends_s))

    def _write(self) -> None:
        """Write what was found, at the last step or when the script ends before."""
        if not self._is_written and len(self._ends_s) >= FEWEST_STEPS:
            self._is_written = True
            self._path.write_text(json.dumps(self._found()))

    def _found(self) -> dict[str, Any]:
        ends_s = self._ends_s[_WARMUP_STEPS:]
        return {
            "steps_s": [after - before for before, after in itertools.pairwise(ends_s)],
            "bucket_cap_mb": self._bucket_cap_mb,
            "models": [self._about(place, model) for place, model in enumerate(self._figures())],
            "parameters": parameter_digests(self._models or live_objects(DistributedDataParallel)),
        }

    def _about(self, place: int, figures: dict[str, Any]) -> dict[str, Any]:
        """The figures of a model, with the profile beside them."""
        state = self._auto.models[place].state
        profile = None if state is None else state.profile()
        why = None if state is None else state.tuning_progress()
        if profile is not None:
            profile.save(self._path.with_suffix(".profile"))
        # That a plan was not worth it is no fault of the script, and what the verdict is about.
        obstacles = {what: times for what, times in figures["obstacles"].items() if what not in (NOT_FASTER, why)}
        return figures | {
            "obstacles": obstacles,
            "has_profile": profile is not None,
            "is_tuned": state is not None and state.tuning,
            "why": why,
        }
