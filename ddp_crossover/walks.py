"""Walks through what objects of users hold, which may lead back to itself, or be nested deeper than calls can be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import NoneType
from typing import Any

# Far from the depth at which Python ends a recursion, of which a level takes up to four calls.
_DEEPEST = 50
_MOST_HOLDERS = 100_000

HOLD_NOTHING = frozenset((NoneType, bool, int, float, str))
"""Types of most of what there is to walk through, in each step."""

Parts = Callable[[Any], Collection[Any]]
"""What is directly in a value; nothing if it holds no others."""


def walk(value: Any, parts: Parts, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """A value, and all that is in it, as often as it is there. Looks into each object once.

    Args:
        value: the value.
        parts: what is directly in a value.
        seen: objects not to look into, by id, to which those are added that this looks into.
    """
    todo, seen = [value], {} if seen is None else seen
    while todo:
        yield (each := todo.pop())
        if id(each) not in seen and (inner := parts(each)):
            seen[id(each)] = each  # kept, so that no other object gets its id
            todo += reversed(list(inner))


def is_tree(value: Any, parts: Parts) -> bool:
    """Whether a recursion over a value ends: nothing in it leads back to itself, and it is not too deep or too large.

    What several objects in it share counts once for each.
    """
    todo, holders = [(value, 0)], 0
    while todo:
        each, depth = todo.pop()
        if inner := parts(each):
            holders += 1
            if depth > _DEEPEST or holders > _MOST_HOLDERS:
                return False
            todo += [(part, depth + 1) for part in inner if type(part) not in HOLD_NOTHING]
    return True
