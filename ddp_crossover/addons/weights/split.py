"""How many samples of a batch each rank gets, so that the slowest one is done as early as possible. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Speed(NamedTuple):
    """The compute time of a rank's batch: ``base_s + per_sample_s * samples``, in seconds."""

    base_s: float
    per_sample_s: float

    def seconds(self, samples: int) -> float:
        """Time of a batch; of an empty one, nothing."""
        return self.base_s + self.per_sample_s * samples if samples else 0.0


def split(total: int, speeds: Sequence[Speed], most: Sequence[int]) -> list[int]:
    """Share ``total`` samples so that the longest time of a rank is least. Each gets one, if there are so many.

    One sample after another goes to the rank that is then done first, which is best because no rank gets faster with
    more samples.

    Args:
        total: samples of all ranks.
        speeds: of each rank.
        most: the most samples that each rank may get.

    Returns:
        Whole numbers that add up to ``total``. Ranks that are equally fast get numbers that differ by at most one.

    Raises:
        ValueError: if ``most`` does not allow it.
    """
    if total > sum(most):
        raise ValueError(f"a batch of {total} samples does not fit: the ranks take at most {list(most)}")
    least = 1 if total >= len(speeds) else 0
    sizes = [min(least, limit) for limit in most]
    heap = [
        (speed.seconds(size + 1), rank)
        for rank, (speed, size, limit) in enumerate(zip(speeds, sizes, most, strict=True))
        if size < limit
    ]
    heapq.heapify(heap)
    for _ in range(total - sum(sizes)):
        _, rank = heap[0]
        sizes[rank] += 1
        if sizes[rank] < most[rank]:
            heapq.heapreplace(heap, (speeds[rank].seconds(sizes[rank] + 1), rank))
        else:
            heapq.heappop(heap)
    return sizes


def longest_s(sizes: Sequence[int], speeds: Sequence[Speed]) -> float:
    """The time of the slowest rank."""
    return max(speed.seconds(size) for size, speed in zip(sizes, speeds, strict=True))
