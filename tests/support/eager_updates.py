"""Updates in backward as often as it goes, with other groups on each rank, whatever the link does."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from ddp_crossover.sharding import early_updates, exchange
from ddp_crossover.sharding.parameter_gathers import ParameterGathers
from equivalence import Run


@contextlib.contextmanager
def eager_updates(seed: int) -> Iterator[list[bool]]:
    """Wait for scatter legs in backward, so that groups can be updated there; yields whether each step took them."""
    draw = random.Random(f"{seed} on rank {dist.get_rank()}")
    go_ahead, end_step = ParameterGathers._go_ahead, early_updates.EarlyUpdates.end_step
    taken: list[bool] = []

    def wait_and_go_ahead(self: ParameterGathers) -> None:
        for group in self._launched:
            if draw.random() < 0.5:
                group.scatter.wait()
        self._latest_early = None
        go_ahead(self)

    def note(self: Any, iteration: int, *, are_taken: bool) -> None:
        if self._snapshot is not None:
            taken.append(are_taken)
        end_step(self, iteration, are_taken=are_taken)

    with (
        mock.patch.object(ParameterGathers, "_go_ahead", wait_and_go_ahead),
        mock.patch.object(early_updates.EarlyUpdates, "end_step", note),
        mock.patch.object(early_updates, "_GOOD_STEPS", 1),
        mock.patch.object(early_updates, "_LONGEST_BREAK", 1),
        # So that an exchange has several parts.
        mock.patch.object(exchange, "EXCHANGE_BYTES", 200),
    ):
        yield taken


def eagerly(run: Run, loop: Any, seed: int, at_least: int = 0) -> Iterator[Any]:
    """A loop with them, of which so many must have counted."""
    with eager_updates(seed) as taken:
        yield from loop(run)
    if run.with_dear:
        assert sum(taken) >= at_least, taken
