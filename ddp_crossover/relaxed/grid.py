"""With which ranks a rank shares its parameters, round after round: the lines of a grid of ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def shape_of(groups: str, world_size: int) -> tuple[int, ...]:
    """The lengths of the grid's dimensions.

    Args:
        groups: ``"grid"``: two dimensions, as nearly square as may be; ``"pairs"``: as many as there are, of two.
        world_size: number of ranks.

    Raises:
        ValueError: if the ranks make no such grid.
    """
    if groups == "pairs":
        if world_size < 2 or world_size & (world_size - 1):
            raise ValueError(f"groups='pairs' needs 2, 4, 8, ... ranks, and there are {world_size}: leave out groups=")
        return (2,) * (world_size.bit_length() - 1)
    rows = max(rows for rows in range(1, math.isqrt(world_size) + 1) if world_size % rows == 0)
    if rows == 1:
        raise ValueError(
            f"groups='grid' needs ranks in rows and columns, and {world_size} is no product: leave out groups="
        )
    return rows, world_size // rows


def lines(shape: Sequence[int]) -> list[list[list[int]]]:
    """For each dimension, the ranks of each of its lines. Every rank is in one line of each dimension."""
    ranks = torch.arange(math.prod(shape)).view(*shape)
    return [ranks.movedim(place, -1).reshape(-1, length).tolist() for place, length in enumerate(shape)]
