"""How long arms take in times of `auto` and of `shard`, round by round. Pure."""

from typing import Any

import numpy as np

from bench_kit.rounds import median_at_least, spread
from bench_parts.arms import ArmName

REFERENCES = ("auto", "shard")


def with_ratios(case: dict[str, Any]) -> dict[str, Any]:
    """One case of `bench_parts.summary`, with the key `over` in each arm, and with the best bucket size of `zero`.

    `over` holds, for each reference, the ratios of this arm's step to that of the reference in the same round: their
    median and quartiles, and what the median is at least. None for the reference itself, and if it was not measured.
    """
    rounds_s = {arm["arm"]: np.array(arm["rounds_s"]) for arm in case["arms"] if not arm["refused"]}
    measured = [
        arm | {"over": {reference: _over(rounds_s, arm["arm"], reference) for reference in REFERENCES}}
        for arm in case["arms"]
    ]
    zeros = [name for name in rounds_s if ArmName.parse(name).kind == "zero"]
    best_zero = min(zeros, key=lambda name: float(np.median(rounds_s[name])), default=None)
    return case | {"best_zero": best_zero, "arms": measured}


def _over(rounds_s: dict[str, np.ndarray], name: str, reference: str) -> dict[str, float | None] | None:
    if name == reference or not {name, reference} <= rounds_s.keys():
        return None
    ratios = (rounds_s[name] / rounds_s[reference]).tolist()
    return {**spread(ratios), "at_least": median_at_least(ratios)}
