"""Says what dear_hook would gain, and why: from measured compute times, a link and a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from ddp_crossover.addons.codes.wire import wire_of
from ddp_crossover.fusion import Schedule
from ddp_crossover.log import short
from ddp_crossover.plan.cost_model import LinkModel
from ddp_crossover.plan.ddp_buckets import all_communication_s, simulate_ddp
from ddp_crossover.plan.gradient_specs import as_codes
from ddp_crossover.plan.model_profile import ModelProfile
from ddp_crossover.plan.search import best_of_sizes

# Smaller gains are within what steps differ by themselves.
_NOTICEABLE = 0.03
_LEAST = 0.001  # what is printed as more than 0
# A line of the script that needs all updates at once in more steps than this prevents the overlap.
_OFTEN = 0.5
# Balance is named from this gain of compute on; ranks of one kind differ by a few percent.
_UNEQUAL = 0.08
# Several connections are named if they are faster than one by this: each also costs the processors something.
_LIMITED = 0.3
_FEWEST_RANKS = 2
_NANOSECOND = 1e-9
_SHARDED = "norms='sharded'"  # in an advice


@dataclass(frozen=True)
class StepTime:
    """A measured step time, in seconds.

    Attributes:
        median_s: of all steps.
        low_s: below it with 95% confidence.
        high_s: above it with 95% confidence.
    """

    median_s: float
    low_s: float
    high_s: float

    @classmethod
    def of(cls, *runs: Sequence[float], drift: float = 1.0) -> StepTime:
        """Return the step time of runs of a script.

        Args:
            runs: the durations of steps, in seconds. The interval reaches over those of the runs.
            drift: by this factor the machine may have changed from one run to the other.
        """
        ends = [end_s for run in runs for end_s in _median_interval(run)]
        return cls(median([duration_s for run in runs for duration_s in run]), min(ends) / drift, max(ends) * drift)


def _median_interval(durations_s: Sequence[float]) -> tuple[float, float]:
    """The 95% confidence interval of a median, from order statistics: whatever the distribution."""
    ordered = sorted(durations_s)
    middle, half = (len(ordered) - 1) / 2, 0.98 * math.sqrt(len(ordered))
    return ordered[max(0, math.floor(middle - half))], ordered[min(len(ordered) - 1, math.ceil(middle + half))]


@dataclass(frozen=True)
class Prediction:
    """Step times of one model on one link, in seconds.

    Attributes:
        plain_s: of plain DDP; measured where the script was run, else predicted. Where ours is predicted, never longer
            than compute and communication one after the other.
        plain_predicted_s: of plain DDP, predicted.
        ours_s: with dear_hook; measured where the script was run and its steps overlapped, else predicted.
        ours_predicted_s: with dear_hook, predicted.
        compute_s: of a step that never waits for communication.
        communication_s: of all gradients alone on the link.
        fusion_mb: size of the fusion groups that are predicted to be the fastest.
        gain_low: how much faster a step is at least: 0.1 means 10%. Below 0 if it may be slower.
        gain_high: how much faster it is at most.
        int8_s: with ``wire_dtype=torch.int8``, predicted; None where that is not to be had.
    """

    plain_s: float
    plain_predicted_s: float
    ours_s: float
    ours_predicted_s: float
    compute_s: float
    communication_s: float
    fusion_mb: float
    gain_low: float
    gain_high: float
    int8_s: float | None = None

    @property
    def gain(self) -> float:
        """How much faster a step is. Never below 0, because the tuner would keep plain all-reduces."""
        return max(0.0, self.plain_s / self.ours_s - 1)

    @property
    def may_pay(self) -> bool:
        """Whether a gain that would be noticed cannot be ruled out."""
        return self.gain_high >= _NOTICEABLE

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {**asdict(self), "gain": self.gain}


def predict(
    profile: ModelProfile,
    bucket_cap_mb: float,
    plain: StepTime | None = None,
    ours: StepTime | None = None,
    int8_s_per_element: float | None = None,
) -> Prediction:
    """Predict step times.

    Args:
        profile: the model, with a link.
        bucket_cap_mb: DDP's bucket size.
        plain: measured step time of plain DDP, or None.
        ours: measured step time under the plan that the simulator has chosen, or None.
        int8_s_per_element: seconds by which 8-bit codes delay a leg, per element; None: they cannot be had.
    """
    if plain is not None:
        profile = _at_most(profile, plain.median_s)
    assert profile.link is not None
    plain_predicted_s = simulate_ddp(profile, bucket_cap_mb).step_s
    fusion_mb, best = best_of_sizes(profile.specs, profile.compute, profile.link, profile.world_size, Schedule.AUTO)
    communication_s = all_communication_s(profile)
    compute_s = profile.compute.compute_s
    plain_s, ours_s = plain_predicted_s, best.step_s
    gains = [plain_s / ours_s - 1]
    if plain is not None and ours is not None:
        plain_s, ours_s = plain.median_s, ours.median_s
        gains = [plain.low_s / ours.high_s - 1, plain.high_s / ours.low_s - 1]
    elif plain is not None:
        # What plain DDP took beyond compute and communication one after the other, was taken by something else.
        plain_s = min(plain.median_s, compute_s + communication_s)
        gains += [min(end_s, compute_s + communication_s) / ours_s - 1 for end_s in (plain.low_s, plain.high_s)]
    most = communication_s / compute_s  # all of it exposed before, and nothing after
    return Prediction(
        plain_s=plain_s,
        plain_predicted_s=plain_predicted_s,
        ours_s=ours_s,
        ours_predicted_s=best.step_s,
        compute_s=compute_s,
        communication_s=communication_s,
        fusion_mb=fusion_mb,
        gain_low=min(most, *gains),
        gain_high=min(most, max(gains)),
        int8_s=None if int8_s_per_element is None else _with_int8_s(profile, int8_s_per_element),
    )


def _at_most(profile: ModelProfile, step_s: float) -> ModelProfile:
    """The profile, with compute that fits into a step of plain DDP; it does not if the machine was busier meanwhile."""
    factor = step_s / profile.compute.compute_s
    return profile if factor >= 1 else replace(profile, compute=profile.compute.times(factor))


def _with_int8_s(profile: ModelProfile, codec_s_per_element: float) -> float:
    """The step time if all gradients travel as 8-bit codes."""
    assert profile.link is not None
    _, step = best_of_sizes(
        as_codes(profile.specs, wire_of(torch.int8)),
        profile.compute,
        profile.link,
        profile.world_size,
        Schedule.AUTO,
        codec_s_per_element=codec_s_per_element,
    )
    return step.step_s


def about_int8(prediction: Prediction) -> str | None:
    """One sentence about 8-bit codes, if they cannot be had without losing exactness and would be worth it."""
    exact_s = min(prediction.ours_s, prediction.plain_s)
    if prediction.int8_s is None or exact_s / prediction.int8_s - 1 < _NOTICEABLE:
        return None
    return (
        f"With wire_dtype=torch.int8, which is no longer exact: {duration(prediction.int8_s)} a step predicted "
        f"({prediction.plain_s / prediction.int8_s:.2f} times)."
    )


def about_numba(int8: str | None, *, is_there: bool) -> str | None:
    """One sentence about numba, if it is not there and :func:`about_int8` has said that codes would be worth it."""
    if int8 is None or is_there:
        return None
    return (
        "Install numba (pip install numba): it compiles the loops that make 8-bit codes, for which operations of torch "
        "take several times the processor time."
    )


def about_connections(
    link: LinkModel, several: LinkModel, number: int, of_script: LinkModel | None = None
) -> str | None:
    """One sentence about a link that limits each connection.

    Args:
        link: the link with one connection to each peer.
        several: the same with several.
        number: how many these are.
        of_script: the link of a script that attaches by itself, which may have several already.
    """
    s_per_byte = link.s_per_byte if of_script is None else min(link.s_per_byte, of_script.s_per_byte)
    if not several.s_per_byte or s_per_byte < (1 + _LIMITED) * several.s_per_byte:  # 0: too fast to be measured
        return None
    one_gbps, several_gbps = (8e-9 / one.s_per_byte for one in (link, several))
    return (
        f"A connection reaches {short(one_gbps)} Gb/s here, and {number} reach {short(several_gbps)}: attach with "
        f"connections={number} (under run: --connections {number})."
    )


def about_plain_overlap(prediction: Prediction, plain: StepTime) -> str | None:
    """One sentence about plain DDP's all-reduces, if backward was measured to hide less than half of what it could."""
    one_after_the_other_s = prediction.compute_s + prediction.communication_s
    could_be_s = one_after_the_other_s - prediction.plain_predicted_s
    hidden_s = max(0.0, one_after_the_other_s - plain.low_s)
    if could_be_s / plain.median_s < _NOTICEABLE or hidden_s > could_be_s / 2:
        return None
    return (
        f"Plain DDP hides {duration(hidden_s)} of its all-reduces behind backward, where {duration(could_be_s)} was "
        "predicted. If its backend is nccl2 (torch's nccl from 2.15 on), ask again with TORCH_DIST_USE_NCCL2=0."
    )


def about_slow_ranks(rank_compute_s: Sequence[float], plain: StepTime) -> str | None:
    """One sentence about a rank that computes slowly, if batches by speed would be worth it.

    Args:
        rank_compute_s: how long each rank computes in a step.
        plain: steps of plain DDP. Ranks that differ by less than these steps may differ by chance.
    """
    if len(rank_compute_s) < _FEWEST_RANKS or min(rank_compute_s) <= 0:
        return None
    slowest_s = max(rank_compute_s)
    balanced_s = len(rank_compute_s) / sum(1 / seconds for seconds in rank_compute_s)
    if slowest_s / balanced_s < max(1 + _UNEQUAL, plain.high_s / plain.low_s):
        return None
    slowest = list(rank_compute_s).index(slowest_s)
    return (
        f"Rank {slowest} is the slowest: it computes for {duration(slowest_s)} a step, the fastest for "
        f"{duration(min(rank_compute_s))}. With batches by speed (weighted=True, dx.BalancedSampler) all would "
        f"compute for about {duration(balanced_s)}, so a step would take up to "
        f"{duration(slowest_s - balanced_s)} less."
    )


def verdict(prediction: Prediction, obstacles: Mapping[str, int], steps: int, command: str) -> str:
    """Return one paragraph: whether it pays, how much, why, what to do.

    Args:
        prediction: the step times.
        obstacles: lines of the script, or reasons, that cost overlap, and in how many steps.
        steps: number of steps in which they were counted.
        command: what to start to have it.
    """
    low, high = prediction.gain_low, prediction.gain_high
    exposed_s = max(0.0, prediction.plain_s - prediction.compute_s)
    why = (
        f"compute takes {duration(prediction.compute_s)} a step and communication alone "
        f"{duration(prediction.communication_s)}, of which plain DDP leaves {duration(exposed_s)} exposed"
    )
    steps_take = f"{duration(prediction.ours_s)} a step instead of {duration(prediction.plain_s)}"
    if prediction.gain > max(high, 0.0) + _LEAST:  # by what else the machines did
        steps_take += ", more than communication explains"
    interval = f"{1 + low:.2f} to {1 + high:.2f} times as fast ({steps_take}; {why})"
    if not prediction.may_pay:
        gain = f"a gain of at most {high:.1%}" if high >= _LEAST else "no gain"
        return f"Not worth it here: {gain} ({steps_take}; {why})."
    if low < _NOTICEABLE:
        return f"Cannot tell: {interval}. Ask again with more --steps, or when these machines do nothing else."
    if any(times > _OFTEN * steps for times in obstacles.values()):
        return f"Not as the script is: most steps wait for all gradients or updates. If they did not: {interval}."
    return f"Worth it: {interval}. {command}"


def costs(obstacles: Mapping[str, int], advice: Mapping[str, str], steps: int, norms: str | None) -> list[str]:
    """Return lines about what costs overlap, the most frequent first; each way out is said once.

    Args:
        obstacles: lines of the script, or reasons, and in how many steps.
        advice: for some of them, how to get around them.
        steps: number of steps in which they were counted.
        norms: option of ``attach`` with which they were counted.
    """
    lines, said = [], set()
    for what, times in sorted(obstacles.items(), key=lambda one: -one[1]):
        way_out = advice.get(what, "")
        lines.append(f"Costs overlap in {min(times, steps)} of {steps} steps: {what}.")
        if way_out and way_out not in said:
            lines.append(f"  {way_out.rstrip('.')}.")
            said.add(way_out)
    if any(_SHARDED in way_out for way_out in said) and norms is None:
        lines.append("  What stands behind that, the doctor says with --norms sharded.")
    return lines


def duration(seconds: float) -> str:
    """Return a duration in the unit in which it is easily read."""
    if seconds >= 1:
        return f"{short(seconds)} s"
    if seconds < _NANOSECOND:  # rounding
        return "0 ms"
    return f"{short(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{short(seconds * 1e6)} us"
