"""Compares records of one training script: two runs of plain DDP and an attached one, and one run on all ranks."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddp_crossover.log import first_of

# Sums and norms in another order differ by this much at most after some steps, relative to the largest value of a
# parameter.
_ROUNDING = 1e-4
# Options that send less than the gradients.
_LOSSY = ("wire_dtype", "compress")


@dataclass(frozen=True)
class Verdict:
    """What a comparison has shown on one rank.

    Attributes:
        exit_status: 0 if all is equal, 1 if not, 2 if it could not be compared.
        text: the verdict in words.
        first_difference: where the runs differ first; None if they do not.
        losses: number of losses compared.
        steps: number of optimizer steps compared.
        overlapped_steps: steps of the attached run that were overlapped, over all models.
        finished_steps: steps of the attached run that could have been.
    """

    exit_status: int
    text: str
    first_difference: str | None
    losses: int
    steps: int
    overlapped_steps: int
    finished_steps: int


def compare(
    plain: Path, attached: Path, again: Path, options: Mapping[str, Any], why_not_attached: str = ""
) -> Verdict:
    """Compare what one rank recorded in three runs.

    Args:
        plain: file of the record of plain DDP, with the parameters beside it.
        attached: file of the record of the attached run.
        again: file of the record of plain DDP, a second time.
        options: of ``attach``, which may have made a difference that is expected.
        why_not_attached: why nothing was attached to, if nothing was.
    """
    first, other, second = (json.loads(file.read_text()) for file in (plain, attached, again))
    models = other["models"]
    overlapped = sum(model["overlapped_steps"] for model in models)
    finished = sum(model["finished_steps"] for model in models)
    losses, steps = len(first["losses"]), len(first["before_steps"])

    def verdict(exit_status: int, text: str, difference: str | None = None) -> Verdict:
        by_script = "The script attaches by itself; plain is with DDP_CROSSOVER=off. "
        is_own = any(model["by_script"] for model in models)
        return Verdict(exit_status, by_script * is_own + text, difference, losses, steps, overlapped, finished)

    if not models:
        return verdict(2, f"nothing was attached to, so there is nothing to compare: {why_not_attached}")
    unsteady = first_difference(first, second, "plain", "plain again")
    if unsteady is not None:
        text = (
            f"the script does not repeat itself with plain DDP: {unsteady}. Seed everything that it draws, choose "
            "deterministic algorithms, and verify again"
        )
        return verdict(2, text)
    if not any(model["pipelined_iterations"] for model in models):
        reasons = "; ".join(dict.fromkeys(why for model in models for why in model["fallbacks"]))
        text = (
            f"nothing went through the pipeline in {steps} optimizer steps, so there is nothing to compare. It begins "
            f"after some steps: let the script make more, and see --steps{f' ({reasons})' if reasons else ''}"
        )
        return verdict(2, text)
    difference = first_difference(first, other, "plain", "attached")
    plain_steps = sum(model["iterations"] - model["pipelined_iterations"] for model in models)
    compared = f"{steps} optimizer steps, {losses} losses; {overlapped} of {finished} steps hid their all-gathers"
    compared += f", {plain_steps} more were plain all-reduces" * bool(plain_steps)
    left_alone = steps - sum(model["iterations"] for model in models)
    if left_alone > 0:
        compared += f", and DDP was left alone in the other {left_alone}: with --fusion-mb 8 it is not"
    if difference is None:
        how = "DDP that adds in rank order" if first["sums_are_in_rank_order"] else "plain DDP"
        text = f"parameters, buffers, optimizer state and losses equal {how}'s bit for bit ({compared})"
        return verdict(0, text if 2 * overlapped >= finished else f"{text}. {_how_weak(models)}")
    distance = _largest_distance(plain.with_suffix(".pt"), attached.with_suffix(".pt"))
    size = f"parameters differ from plain DDP's by up to {distance:.1e} of their largest value at the end"
    # Other sums change values, but not how many there are.
    as_many = all(len(first[what]) == len(other[what]) for what in ("losses", "before_steps"))
    lossy = [f"{name}={value}" for name, value in options.items() if name in _LOSSY and as_many]
    if lossy:
        text = f"a difference is expected with {', '.join(lossy)}, and of any size: {size}; first: {difference}"
        return verdict(2, f"{text} ({compared})", difference)
    why = _why_rounding(options, sums_may_round=other["sums_may_round"])
    if why and as_many and distance <= _ROUNDING:
        text = f"within rounding, which is expected because {why}: {size}; first: {difference} ({compared})"
        return verdict(0, text, difference)
    beyond = f", more than rounding explains, although {why}" if why else ""
    return verdict(1, f"DIFFERENT from plain DDP: {difference}; {size}{beyond} ({compared})", difference)


def _why_rounding(options: Mapping[str, Any], *, sums_may_round: bool) -> str:
    """Why the last bits may differ; empty if they may not."""
    reasons = []
    if sums_may_round:
        reasons.append("plain DDP adds in an order of its own")
    if options.get("norms") == "sharded":
        reasons.append("with norms='sharded' the last bits of clipped norms may differ")
    if options.get("groups"):
        reasons.append("with groups='node' gradients are added in another order")
    return " and ".join(reasons)


def _how_weak(models: list[dict[str, Any]]) -> str:
    """What to say if most steps waited as plain DDP does, so that little was tried."""
    causes = Counter({what: times for model in models for what, times in model["obstacles"].items()})
    why = "".join(f"; {what} ({times} times)" for what, times in causes.most_common(1))
    return f"Most steps did not overlap, so this says little about a run whose steps do{why}"


def first_difference(left: dict[str, Any], right: dict[str, Any], left_name: str, right_name: str) -> str | None:
    """Return where two records differ first in the order of training, in words; None if they are equal."""
    for number, (one, two) in enumerate(zip(left["before_steps"], right["before_steps"], strict=False)):
        # What forward has not used is pending and was not read.
        name = next((name for name in one if name in two and one[name] != two[name]), None)
        if name is not None:
            return f"{name} before optimizer step {number + 1}"
    for number, (one, two) in enumerate(zip(left["losses"], right["losses"], strict=False)):
        if one != two and (one == one or two == two):  # NaN is not equal to itself
            return f"loss {number + 1} is {one!r} ({left_name}) and {two!r} ({right_name})"
    for what in ("losses", "before_steps"):
        if len(left[what]) != len(right[what]):
            return f"{len(left[what])} {what.replace('_', ' ')} ({left_name}) and {len(right[what])} ({right_name})"
    for what in ("parameters", "buffers", "optimizers"):
        one, two = _by_name(left[what]), _by_name(right[what])
        name = next((name for name in [*one, *two] if one.get(name) != two.get(name)), None)
        if name is not None:
            return f"{name} ({what}) at the end"
    return None


def _by_name(digests: dict[str, str] | list[dict[str, str]]) -> dict[str, str]:
    if isinstance(digests, dict):
        return digests
    several = len(digests) > 1
    return {
        (f"optimizer {place + 1}, {name}" if several else name): value
        for place, one in enumerate(digests)
        for name, value in one.items()
    }


def _largest_distance(left: Path, right: Path) -> float:
    """Return the largest difference of two sets of parameters, relative to the largest value of each parameter."""

    def distance(one: torch.Tensor, two: torch.Tensor) -> float:
        if torch.equal(one.isnan(), two.isnan()) and torch.equal(one.isinf(), two.isinf()):
            finite = one.isfinite()
            one, two = one.where(finite, 0.0), two.where(finite, 0.0)
            return float((one - two).abs().max() / one.abs().max().clamp(min=1e-30))
        return math.inf

    one, two = (torch.load(path, weights_only=True) for path in (left, right))
    if one.keys() != two.keys():
        return math.inf
    return max((distance(one[name].double(), two[name].double()) for name in one if one[name].numel()), default=0.0)


def why_different(ranks: Iterable[Mapping[str, str]], why_apart: str | None = None) -> str | None:
    """Return one sentence about parameters that ranks have differently; None if all are the same.

    DDP that is trained as it should be has the same ones everywhere.

    Args:
        ranks: the digests of each rank.
        why_apart: what was said while they trained; None if nothing was.
    """
    first, *others = ranks
    names = [name for name in first if any(other.get(name) != first[name] for other in others)]
    if not names:
        return None
    if why_apart is not None:
        return f"The ranks have different parameters ({first_of(names)}): {why_apart}."
    return (
        f"The ranks have different parameters: gradients of {first_of(names)} were never reduced, or something else "
        "has changed these on some ranks only."
    )
