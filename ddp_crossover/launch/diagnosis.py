"""Says what dear_hook would gain, and why: from measured compute times, a link and a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ddp_crossover.codecs.wire import Wire
from ddp_crossover.fusion import Schedule
from ddp_crossover.planning.ddp_buckets import all_communication_s, simulate_ddp
from ddp_crossover.planning.gradient_specs import as_codes
from ddp_crossover.planning.model_profile import ModelProfile
from ddp_crossover.planning.search import best_of_sizes

# Smaller gains are within what steps differ by themselves.
_NOTICEABLE = 0.03
# A line of the script that needs all updates at once in more steps than this prevents the overlap.
_OFTEN = 0.5
# Balance is named from this gain of compute on; ranks of one kind differ by a few percent.
_UNEQUAL = 0.08
_FEWEST_RANKS = 2


@dataclass(frozen=True)
class Prediction:
    """Step times of one model on one link, in seconds.

    Attributes:
        plain_s: of plain DDP; measured where the script was run, else predicted. Never longer than compute and
            communication one after the other.
        plain_predicted_s: of plain DDP, predicted.
        ours_s: with dear_hook; measured where the script was run and its steps overlapped, else predicted.
        ours_predicted_s: with dear_hook, predicted.
        compute_s: of a step that never waits for communication.
        communication_s: of all gradients alone on the link.
        fusion_mb: size of the fusion groups that are predicted to be the fastest.
        int8_s: with ``wire_dtype=torch.int8``, predicted; None where that is not to be had.
    """

    plain_s: float
    plain_predicted_s: float
    ours_s: float
    ours_predicted_s: float
    compute_s: float
    communication_s: float
    fusion_mb: float
    int8_s: float | None = None

    @property
    def gain(self) -> float:
        """How much faster a step is: 0.1 means 10%. Never below 0, because the tuner would keep plain all-reduces."""
        return max(0.0, self.plain_s / self.ours_s - 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {**asdict(self), "gain": self.gain}


def predict(
    profile: ModelProfile,
    bucket_cap_mb: float,
    plain_s: float | None = None,
    ours_s: float | None = None,
    int8_s_per_element: float | None = None,
) -> Prediction:
    """Predict step times.

    Args:
        profile: the model, with a link.
        bucket_cap_mb: DDP's bucket size.
        plain_s: measured step time of plain DDP, or None.
        ours_s: measured step time under the plan that the simulator has chosen, or None.
        int8_s_per_element: seconds by which 8-bit codes delay a leg, per element; None: they cannot be had.
    """
    assert profile.link is not None
    world_size = profile.world_size
    plain = simulate_ddp(profile, bucket_cap_mb)
    fusion_mb, ours = best_of_sizes(profile.specs, profile.compute, profile.link, world_size, Schedule.AUTO)
    communication_s = all_communication_s(profile)
    # What plain DDP took beyond compute and communication one after the other, was taken by something else.
    longest_s = profile.compute.compute_s + communication_s
    return Prediction(
        plain_s=plain.step_s if plain_s is None else min(plain_s, longest_s),
        plain_predicted_s=plain.step_s,
        ours_s=ours.step_s if ours_s is None else ours_s,
        ours_predicted_s=ours.step_s,
        compute_s=profile.compute.compute_s,
        communication_s=communication_s,
        fusion_mb=fusion_mb,
        int8_s=None if int8_s_per_element is None else _with_int8_s(profile, int8_s_per_element),
    )


def _with_int8_s(profile: ModelProfile, codec_s_per_element: float) -> float:
    """The step time if all gradients travel as 8-bit codes."""
    assert profile.link is not None
    _, step = best_of_sizes(
        as_codes(profile.specs, Wire.of(torch.int8)),
        profile.compute,
        profile.link,
        profile.world_size,
        Schedule.AUTO,
        codec_s_per_element=codec_s_per_element,
    )
    return step.step_s


def about_int8(prediction: Prediction) -> str | None:
    """One sentence about 8-bit codes, if they cannot be had without losing exactness and would be worth it."""
    if prediction.int8_s is None or prediction.ours_s / prediction.int8_s - 1 < _NOTICEABLE:
        return None
    return (
        f"With wire_dtype=torch.int8, which is no longer exact: {prediction.int8_s * 1e3:.3g} ms a step predicted "
        f"({prediction.plain_s / prediction.int8_s:.2f} times)."
    )


def about_slow_ranks(rank_compute_s: Sequence[float]) -> str | None:
    """One sentence about a rank that computes slowly, if batches by speed would be worth it."""
    if len(rank_compute_s) < _FEWEST_RANKS or min(rank_compute_s) <= 0:
        return None
    slowest_s = max(rank_compute_s)
    balanced_s = len(rank_compute_s) / sum(1 / seconds for seconds in rank_compute_s)
    if slowest_s / balanced_s - 1 < _UNEQUAL:
        return None
    slowest = list(rank_compute_s).index(slowest_s)
    return (
        f"Rank {slowest} is the slowest: it computes for {slowest_s * 1e3:.3g} ms a step, the fastest for "
        f"{min(rank_compute_s) * 1e3:.3g}. With batches by speed (weighted=True, dx.BalancedSampler) all would "
        f"compute for about {balanced_s * 1e3:.3g} ms, so a step would take up to "
        f"{(slowest_s - balanced_s) * 1e3:.3g} ms less."
    )


def verdict(
    prediction: Prediction, obstacles: Mapping[str, int], advice: Mapping[str, str], steps: int, command: str
) -> str:
    """Return one paragraph: whether it pays, how much, why, what in the script costs overlap, what to do.

    Args:
        prediction: the step times.
        obstacles: lines of the script, or reasons, that cost overlap, and in how many steps.
        advice: for some of the obstacles, how to get around them.
        steps: number of steps in which they were counted.
        command: what to start to have it.
    """
    plain_ms, ours_ms = prediction.plain_s * 1e3, prediction.ours_s * 1e3
    exposed_ms = max(0.0, plain_ms - prediction.compute_s * 1e3)
    why = (
        f"compute takes {prediction.compute_s * 1e3:.3g} ms a step and communication alone "
        f"{prediction.communication_s * 1e3:.3g} ms, of which plain DDP leaves {exposed_ms:.3g} ms exposed"
    )
    often = [line for line, times in obstacles.items() if times > _OFTEN * steps]
    if prediction.gain < _NOTICEABLE:
        return (
            f"Not worth it here: no difference is expected ({ours_ms:.3g} ms a step instead of {plain_ms:.3g}); {why}."
        )
    if often:
        way_out = " ".join(dict.fromkeys(f"{advice[what]}. " for what in often if what in advice))
        return (
            f"Not as the script is: {'; '.join(often)}. {way_out}Without that: {ours_ms:.3g} ms a step instead of "
            f"{plain_ms:.3g} ({1 + prediction.gain:.2f} times); {why}."
        )
    return (
        f"Worth it: {ours_ms:.3g} ms a step instead of {plain_ms:.3g} ({1 + prediction.gain:.2f} times); {why}. "
        f"Use: {command}"
    )
