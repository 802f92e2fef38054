"""Examines a script from the inside: runs it for some steps, then writes down what the doctor needs, and ends it."""

from __future__ import annotations

import atexit
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_crossover.comm_hook import DearState
from ddp_crossover.ddp.reducer import NOT_FASTER
from ddp_crossover.launch.leaving import leave
from ddp_crossover.launch.steps_made import STEPS_MADE, StepsMade
from ddp_crossover.torch_internals.ddp import bucket_cap_bytes

# Allocators, caches, iterations that are not pipelined yet or from which the plan is made.
_WARMUP_STEPS = 14
FEWEST_STEPS = 18


class Examination:
    """Times steps, and ends the script after some.

    Args:
        path: where rank 0 writes what was found; None on other ranks.
        steps: number of steps of an optimizer, at least ``FEWEST_STEPS``.
        states: returns what has been attached; nothing if plain DDP is timed.
    """

    def __init__(self, path: Path | None, steps: int, states: Callable[[], list[DearState]]) -> None:
        self._path = path
        self._steps_made = None if path is None else StepsMade(path.with_suffix(f".{STEPS_MADE}"))
        self._steps = steps
        self._states = states
        self._first: Optimizer | None = None
        self._ends_s: list[float] = []
        self._bucket_cap_mb: float | None = None
        register_optimizer_step_post_hook(self._after_step)
        atexit.register(self._write)

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Take note of a model that is trained: of its buckets as the script has set them."""
        if self._bucket_cap_mb is None:
            self._bucket_cap_mb = bucket_cap_bytes(ddp) / 2**20

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._bucket_cap_mb is None:
            return  # nothing of what is trained is DDP yet
        self._first = self._first or optimizer
        if optimizer is not self._first:
            return
        self._ends_s.append(time.perf_counter())
        if self._steps_made is not None:
            self._steps_made.write(len(self._ends_s))
        if len(self._ends_s) < self._steps:
            return
        self._write()
        leave()

    def _write(self) -> None:
        """Write what was found, at the last step or when the script ends before."""
        path, self._path = self._path, None
        if path is not None and len(self._ends_s) >= FEWEST_STEPS:
            path.write_text(json.dumps(self._found(path)))

    def _found(self, path: Path) -> dict[str, Any]:
        ends_s = self._ends_s[_WARMUP_STEPS:]
        found: dict[str, Any] = {
            "step_s": median(after - before for before, after in itertools.pairwise(ends_s)),
            "bucket_cap_mb": self._bucket_cap_mb,
            "models": [],
        }
        for state in self._states():
            profile = state.profile()
            stats, why = state.stats(), state.tuning_progress()
            if profile is not None:
                profile.save(path.with_suffix(".profile"))
            found["models"].append(
                {
                    **asdict(stats),
                    "last_steps": [],
                    # That a plan was not worth it is no fault of the script, and what the verdict is about.
                    "obstacles": {
                        what: times for what, times in stats.obstacles.items() if what not in (NOT_FASTER, why)
                    },
                    "has_profile": profile is not None,
                    "why": why,
                }
            )
        return found
