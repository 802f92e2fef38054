"""The verdict on a soak: what has grown, and where the two runs differ. Pure.

A figure grows if even the lowest sample of the run's last quarter is above the median of its first, by more than
chance. What leaks, leaks all the time, so that holds for a leak; what depends on the plan in force, or on a slow moment
of the machine, comes and goes.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# (share, number) by which a figure may be higher. Heaps are fragmented by and by; caches of torch and of Python fill
# after their first use; a step's time is the machine's. Threads and descriptors are counted exactly.
ALLOWED: dict[str, tuple[float, float]] = {
    "rss_bytes": (0.005, 2**20),
    "threads": (0.0, 0.5),
    "descriptors": (0.0, 0.5),
    "objects": (0.005, 100),
    "tensors": (0.0, 4.5),
    "step_s": (0.5, 0.001),
}
LEAST_IN_A_QUARTER = 2


@dataclass(frozen=True)
class Course:
    """How one figure of one process went.

    Attributes:
        process: the process.
        figure: the figure, a key of `ALLOWED`.
        first: median of the first quarter of the run.
        last: median of the last quarter.
        lowest: lowest sample of the last quarter.
    """

    process: str
    figure: str
    first: float
    last: float
    lowest: float

    @property
    def grows(self) -> bool:
        """Whether this is a leak."""
        share, number = ALLOWED[self.figure]
        return self.lowest > self.first * (1 + share) + number


def courses(ranks: Sequence[dict[str, Any]]) -> list[Course]:
    """The course of every figure.

    Args:
        ranks: of each rank, its `samples`.
    """
    found = []
    for rank in ranks:
        samples = rank["samples"]
        quarter = len(samples) // 4
        assert quarter >= LEAST_IN_A_QUARTER, f"{len(samples)} samples are too few for a verdict"
        first, last = samples[:quarter], samples[-quarter:]
        for process, figures in samples[0]["figures"].items():
            for figure in figures:
                early = [sample["figures"][process][figure] for sample in first]
                late = [sample["figures"][process][figure] for sample in last]
                found.append(Course(process, figure, statistics.median(early), statistics.median(late), min(late)))
    return found


def differences(attached: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> list[str]:
    """Where the runs differ, a line for each rank that does: the first evaluation, and the tensors at the end."""
    found = []
    for rank, (ours, theirs) in enumerate(zip(attached, plain, strict=True)):
        names = ours["digest"].keys() | theirs["digest"].keys()
        unequal = sorted(name for name in names if ours["digest"].get(name) != theirs["digest"].get(name))
        losses = zip(ours["samples"], theirs["samples"], strict=True)
        first = next((mine["step"] for mine, other in losses if mine["loss"] != other["loss"]), None)
        if unequal or first is not None:
            some = ", ".join(itertools.islice(unequal, 3))
            since = f"first unequal loss after step {first}" if first is not None else "all losses are equal"
            found.append(f"rank {rank}: {len(unequal)} of {len(names)} values differ ({some}); {since}")
    return found
