"""What planning is doing, and what it has decided, in words. Pure."""

from __future__ import annotations

from ddp_crossover.fusion import Schedule
from ddp_crossover.log import short
from ddp_crossover.options import Options
from ddp_crossover.plan.trials import Candidate
from ddp_crossover.plan.tuner import TuningResult


def given_plan(options: Options, first_mb: float, known: Candidate | None) -> str | None:
    """The plan that the user's options or the tuned file settle, or None if it has to be found.

    Args:
        options: the user's options.
        first_mb: group size of the first plan, in MiB.
        known: what the tuned file has stored, or None.
    """
    if options.schedule is not Schedule.AUTO or options.fusion_mb is not None:
        why = "chosen by the number of gradients" if options.fusion_mb is None else "as set by fusion_mb"
        return f"schedule {options.schedule} with groups of {short(first_mb)} MiB, {why}"
    if known is not None:
        return f"{in_groups(known)}, as stored in tuned_file {options.tuned_file}"
    return None


def coming(options: Options, given: str | None) -> str:
    """What follows once everything is measured; ``given`` comes from :func:`given_plan`."""
    if given is not None:
        return f"{given}; nothing is tried"
    if not options.tune:
        return "the plan that should be the fastest"
    others = "" if options.shard_optimizer else ", plain all-reduces and DDP as it was"
    if options.has_codes:
        others = ", gradients as they are and plain all-reduces"
    return f"group sizes{others} are tried"


def outcome(
    given: str | None, predicted: Candidate | None, result: TuningResult | None, exposed_s: float | None
) -> str:
    """What was decided.

    Args:
        given: from :func:`given_plan`.
        predicted: the best according to the cost model; it decides if nothing was tried.
        result: what the tuner found, or None if it did not run.
        exposed_s: median seconds of a step in which this rank waited for legs, when the winner was tried; None if not
            measured.
    """
    if result is not None:
        exposed = "" if exposed_s is None else f"; {short(1e3 * exposed_s)} ms exposed"
        return f"tuned: {result.describe()}{exposed}"
    if given is not None:
        return f"not tuned: {given}"
    if predicted is None:
        return "not tuned"
    if predicted.as_built:
        return f"not tuned: {predicted}: the measured link is so fast that this should leave under 1% of a step exposed"
    return f"not tuned: {in_groups(predicted)}, predicted to be the fastest"


def in_groups(candidate: Candidate) -> str:
    """The candidate as a part of a sentence."""
    return str(candidate) if candidate.is_plain else f"groups of {candidate}"
