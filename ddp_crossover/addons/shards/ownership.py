"""Which rank updates which elements of which parameter, and what must move when that changes. Pure.

A parameter is updated by all ranks in flat ranges, or as a whole by one rank, its owner.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class ParameterRange(NamedTuple):
    """Elements ``[start, stop)`` of a parameter, in the memory order of its gradient."""

    parameter: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


Ownership = tuple[tuple[ParameterRange, ...], ...]
"""The ranges of each rank. Every element of every parameter is in exactly one; a parameter without elements, too."""


def in_equal_parts(numels: Mapping[int, int], world_size: int) -> Ownership:
    """Lay parameters end to end, and give each rank an equal part."""
    total = sum(numels.values())
    bounds = [total * rank // world_size for rank in range(world_size + 1)]
    ranges: list[list[ParameterRange]] = [[] for _ in range(world_size)]
    begin = 0
    for parameter, numel in numels.items():
        if not numel:
            ranges[0].append(ParameterRange(parameter, 0, 0))
        for rank in range(world_size):
            low, high = max(bounds[rank], begin), min(bounds[rank + 1], begin + numel)
            if low < high:
                ranges[rank].append(ParameterRange(parameter, low - begin, high - begin))
        begin += numel
    return tuple(map(tuple, ranges))


def owners_by_cost(costs: Mapping[int, float], world_size: int) -> dict[int, int]:
    """Choose an owner for each parameter, so that ranks have about equal costs: the most expensive first."""
    loads = [0.0] * world_size
    owners = {}
    for parameter, cost in sorted(costs.items(), key=lambda item: (-item[1], item[0])):
        owners[parameter] = min(range(world_size), key=loads.__getitem__)
        loads[owners[parameter]] += cost
    return owners


def everything(ownership: Ownership, ranks: Iterable[int]) -> Ownership:
    """What these ranks want if they want all parameters; the others want nothing."""
    ends: dict[int, int] = {}
    for each in ownership:
        for parameter, _, stop in each:
            ends[parameter] = max(ends.get(parameter, 0), stop)
    wanted, ranks = tuple(ParameterRange(parameter, 0, stop) for parameter, stop in sorted(ends.items())), set(ranks)
    return tuple(wanted if rank in ranks else () for rank in range(len(ownership)))


def only(ownership: Ownership, parameters: Iterable[int]) -> Ownership:
    """The part of an ownership that is about these parameters."""
    parameters = set(parameters)
    return tuple(tuple(each for each in ranges if each.parameter in parameters) for ranges in ownership)


def transfers(have: Ownership, want: Ownership) -> list[list[list[ParameterRange]]]:
    """What each rank sends to each rank, itself included, in an order that both can compute: ``[source][target]``."""
    world_size = len(have)
    held: dict[int, list[tuple[int, int, int]]] = {}
    for source, ranges in enumerate(have):
        for parameter, start, stop in ranges:
            if start < stop:
                held.setdefault(parameter, []).append((start, stop, source))
    for spans in held.values():
        spans.sort()
    moves: list[list[list[ParameterRange]]] = [[[] for _ in range(world_size)] for _ in range(world_size)]
    for target, ranges in enumerate(want):
        for parameter, start, stop in ranges:
            spans = held.get(parameter, [])
            first = max(bisect.bisect_right(spans, (start, 0, 0)) - 1, 0)
            for low, high, source in spans[first:]:
                if low >= stop:
                    break
                if max(low, start) < min(high, stop):
                    moves[source][target].append(ParameterRange(parameter, max(low, start), min(high, stop)))
    return moves
