"""What the gradients of each rank are multiplied by before they are added up."""

from __future__ import annotations

from collections.abc import Sequence


class RankWeights:
    """Each rank's share of the global batch: equal shares, as in plain DDP, until counts of samples are set.

    Args:
        rank: this rank.
        world_size: number of ranks.

    Attributes:
        of_ranks: the weights in rank order; they add up to 1.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self.of_ranks: tuple[float, ...] = (1.0 / world_size,) * world_size

    @property
    def own(self) -> float:
        """This rank's weight."""
        return self.of_ranks[self._rank]

    def set_counts(self, counts: Sequence[int]) -> None:
        """Give each rank the weight of its share of all counts. Equal counts give exactly ``1 / world_size``.

        Args:
            counts: one for each rank.

        Raises:
            ValueError: if all are 0.
        """
        total = sum(counts)
        if not total:
            raise ValueError(
                "no rank has a sample in this step, so there is no gradient: leave out the step on all ranks"
            )
        self.of_ranks = tuple(count / total for count in counts)
