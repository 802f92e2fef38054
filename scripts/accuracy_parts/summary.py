"""Figures over seeds, and against fp32 with the same seed. Pure."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from accuracy_parts.tasks import final_window
from accuracy_parts.wires import REFERENCE

FIGURES = ("final_train_loss", "test_loss", "test_accuracy")


class Spread(NamedTuple):
    """A figure over seeds. `to_reference` is the mean difference to fp32 with the same seed."""

    mean: float
    low: float
    high: float
    to_reference: float | None


class Curve(NamedTuple):
    """A loss curve over seeds, one value for each step.

    Each is the mean over so many steps up to there as the final training loss is a mean of, which the curve ends with.
    """

    mean: list[float]
    low: list[float]
    high: list[float]


class HeldOut(NamedTuple):
    """Loss on test data in the middle of training, mean over seeds."""

    samples: float
    train_s: float
    test_loss: float


def held_out(case: dict[str, Any]) -> list[HeldOut]:
    """The points of a case's curve; none if it was evaluated at the end only."""
    of_seeds = zip(*(run.get("held_out", ()) for run in case["runs"]), strict=True)
    return [HeldOut(*(fmean(_number(p[name]) for p in points) for name in HeldOut._fields)) for points in of_seeds]


def first_with(points: Sequence[HeldOut], loss: float) -> HeldOut | None:
    """Where a curve first has this loss, on the line between two points; None if it never has."""
    for before, after in pairwise(points):
        if after.test_loss <= loss < before.test_loss:
            part = (before.test_loss - loss) / (before.test_loss - after.test_loss)
            return HeldOut(*(low + part * (high - low) for low, high in zip(before, after, strict=True)))
    return None


def cases_of(record: dict[str, Any], task: str) -> list[dict[str, Any]]:
    """The cases of one task that have trained."""
    return [case for case in record["cases"] if case["task"] == task and case["runs"]]


def tasks_of(record: dict[str, Any]) -> list[str]:
    """The tasks of which some case has trained."""
    return list(dict.fromkeys(case["task"] for case in record["cases"] if case["runs"]))


def spread(case: dict[str, Any], cases: Sequence[dict[str, Any]], figure: str) -> Spread:
    """One figure of a case, beside that of fp32 among `cases`."""
    values = _values(case, figure)
    reference = next((_values(other, figure) for other in cases if other["wire"] == REFERENCE), None)
    difference = None
    if reference is not None and case["wire"] != REFERENCE:
        difference = fmean(value - wanted for value, wanted in zip(values, reference, strict=True))
    return Spread(fmean(values), *_range(values), difference)


def curve(case: dict[str, Any]) -> Curve:
    """The smoothed loss curves of a case, over seeds."""
    window = final_window(case["steps"])
    smooth = [_running_mean([_number(loss) for loss in run["losses"]], window) for run in case["runs"]]
    at_step = list(zip(*smooth, strict=True))
    ranges = [_range(values) for values in at_step]
    return Curve([fmean(values) for values in at_step], [low for low, _ in ranges], [high for _, high in ranges])


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _values(case: dict[str, Any], figure: str) -> list[float]:
    return [_number(run[figure]) for run in case["runs"]]


def _number(value: float | None) -> float:
    """The record has None for what was not finite."""
    return math.nan if value is None else value


def _range(values: Sequence[float]) -> tuple[float, float]:
    # min() and max() skip NaN or return it, as the order has it.
    return (math.nan, math.nan) if any(map(math.isnan, values)) else (min(values), max(values))
