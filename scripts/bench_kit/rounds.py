"""Interleaved rounds, and the figures that come out of them. Pure.

In each round every candidate takes a turn, and a different one begins: a slow moment of the machine hits all of them
alike, and ratios taken within a round are free of it.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np


class Turn(NamedTuple):
    """One turn of a round. `behind` is the share of all turns that are over when it begins."""

    round: int
    index: int  # type: ignore[assignment]  # hides the method of tuples, which nobody calls
    behind: float


def turns(candidates: int, rounds: int) -> Iterator[Turn]:
    """The turns of all rounds: every candidate once in each, and in each round the next one begins."""
    for number in range(rounds):
        for place in range(candidates):
            behind = (number + place / candidates) / rounds
            yield Turn(number, (number + place) % candidates, behind)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    median, low, high = np.quantile(values, (0.5, 0.25, 0.75)).tolist()
    return {"median": median, "low": low, "high": high}


def best_ddp(rounds_s: Mapping[str, Sequence[float]]) -> str | None:
    """The arm of plain DDP with the bucket size that has the shortest median step; None without such arms."""
    sweep = {name: statistics.median(times) for name, times in rounds_s.items() if name.startswith("ddp@")}
    return min(sweep, key=lambda name: sweep[name], default=None)


def arm_figures(
    name: str, rounds_s: Mapping[str, Sequence[float]], bound_s: float, best: str | None, default: str
) -> dict[str, Any]:
    """One arm's step, also over the bound and over DDP at its best and its default bucket size, by their names."""
    return {
        "arm": name,
        "step_s": spread(rounds_s[name]),
        "over_bound": spread([step_s / bound_s for step_s in rounds_s[name]]),
        "speedup_over_best_ddp": speedup(rounds_s.get(best or ""), rounds_s[name]),
        "speedup_over_default_ddp": speedup(rounds_s.get(default), rounds_s[name]),
    }


def speedup(reference_s: Sequence[float] | None, times_s: Sequence[float]) -> dict[str, float | None] | None:
    """How many times faster than `reference_s`: ratios of the same round, then their median, quartiles and bound."""
    if reference_s is None:
        return None
    ratios = [reference / time for reference, time in zip(reference_s, times_s, strict=True)]
    return {**spread(ratios), "at_least": median_at_least(ratios)}


def median_at_least(values: Sequence[float]) -> float | None:
    """What the median of these samples is at least, with 95% confidence, whatever their distribution.

    Each sample is below the true median with a probability of 1/2, so few are below an order statistic that is low
    enough. None if there are fewer than 5 samples.
    """
    count = len(values)
    below = accumulate(math.comb(count, successes) / 2**count for successes in range(count + 1))
    place = sum(1 for probability in below if probability <= 0.05)
    return sorted(values)[place - 1] if place else None


def jain_index(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 where all shares are equal, 1/n where one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
