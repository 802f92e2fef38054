"""Which two features have met in how many programs, and which pairs are to be drawn next.

Defects are left where two features meet. Programs drawn at random walk common pairs often and rare ones never, so a
campaign may be sent after the pairs that have met least.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from .features import ARM, EVENTS, SCRIPT
from .laws import fit
from .program import Choices, Event, Program

# What a feature is nothing without.
_NEEDS: dict[str, Choices] = {
    "reduce_each": {"micro_batches": 2},
    "batch_around": {"micro_batches": 2},
    "overflow": {"scaler": "stock"},
    "clip_when": {"clip": "norm"},
    "frozen": {"find_unused": True},
    "thawed": {"find_unused": True},
}


def label_of(name: str, value: Any) -> str:
    """How a feature is counted: each word that it can be apart, numbers together."""
    return f"{name}={value}" if isinstance(value, str) else name


ANY = "any value"
"""Wanted of a feature: one of its values but the first, which is none."""


@dataclass(frozen=True)
class Wanted:
    """What every program of a part of a campaign has.

    Attributes:
        script, arm: features, each with a value, or `ANY`.
        events: names of events.
    """

    script: Choices = field(default_factory=dict)
    arm: Choices = field(default_factory=dict)
    events: tuple[str, ...] = ()

    @classmethod
    def of(cls, choices: Choices) -> Wanted:
        """Of features of either kind, and of events, by name; an event has no value.

        Raises:
            ValueError: for a name that is none of them.
        """
        names = [each.name for table in (SCRIPT, ARM, EVENTS) for each in table]
        if unknown := sorted(choices.keys() - set(names)):
            raise ValueError(f"{unknown[0]} is no feature or event: there are {', '.join(names)}")

        def of(table: Iterable[Any]) -> dict[str, Any]:
            return {each.name: choices[each.name] for each in table if each.name in choices}

        return cls(of(SCRIPT), of(ARM), tuple(of(EVENTS)))

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted({**self.script, **other.script}, {**self.arm, **other.arm}, self.events + other.events)

    def is_refused(self, script: Choices, arm: Choices | None = None) -> bool:
        """Whether one of these things cannot be beside what is chosen."""
        features = [(SCRIPT, self.script, script), (ARM, self.arm, {**script, **(arm or {})})]
        return any(
            feature.without({name: value for name, value in beside.items() if name != feature.name})
            for table, mine, beside in features
            for feature in table
            if feature.name in mine
        ) or any(event.without(script) for event in EVENTS if event.name in self.events)


@cache
def traits() -> dict[str, Wanted]:
    """All that a program can have, by label: one value of those that are counted together."""
    found: dict[str, Wanted] = {}
    for table in (SCRIPT, ARM):
        for feature in table:
            for value in feature.values[1:]:
                needs = Wanted.of(_NEEDS.get(feature.name, {}))
                chosen = Wanted({feature.name: value}) if table is SCRIPT else Wanted(arm={feature.name: value})
                found.setdefault(label_of(feature.name, value), needs | chosen)
    for event in EVENTS:
        found[event.name] = Wanted.of(_NEEDS.get(event.name, {})) | Wanted(events=(event.name,))
    return found


@cache
def possible_pairs() -> dict[tuple[str, str], Wanted]:
    """All pairs that a program can have, with what it then has."""
    possible = {}
    for (one, mine), (other, others) in combinations(sorted(traits().items()), 2):
        both = mine | others
        if one.partition("=")[0] == other.partition("=")[0] or both.is_refused(both.script, both.arm):
            continue
        place = {event.name: event.places[0] for event in EVENTS}
        events = tuple(Event(4, place[name], name) for name in both.events)
        if (one, other) in set(pairs_of(fit(Program(2, 0, 9, both.script, (both.arm,), events)))):
            possible[one, other] = both
    return possible


def pairs_of(program: Program) -> Iterator[tuple[str, str]]:
    """All pairs of features that meet in a program, for each of its arms."""
    names = {label_of(*item) for item in program.script.items()} | {event.name for event in program.events}
    for arm in program.arms:
        yield from combinations(sorted(names | {label_of(*item) for item in arm.items()}), 2)


class Meetings:
    """Counts in how many programs each pair has met.

    Args:
        files: what earlier campaigns have written.
    """

    def __init__(self, files: Iterable[str] = ()) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._tried: Counter[tuple[str, str]] = Counter()
        for name in files:
            for one, other, count in json.loads(Path(name).read_text())["pairs"]:
                self.counts[one, other] += count

    def next(self, least: int) -> Wanted | None:
        """What to draw for the pair that has met least; None if every one has met so often."""
        pair = min(possible_pairs(), key=lambda pair: self.counts[pair] + self._tried[pair], default=None)
        if pair is None or self.counts[pair] + self._tried[pair] >= least:
            return None
        self._tried[pair] += 1  # one whose programs fail must not be drawn for ever
        return possible_pairs()[pair]

    def summary(self, least: int) -> str:
        """One line."""
        counts = [self.counts[pair] for pair in possible_pairs()]
        often, seldom = sum(count >= least for count in counts), sum(0 < count < least for count in counts)
        return (
            f"{len(counts)} pairs of features: {often} have met {least} times or more, {seldom} less often, "
            f"{counts.count(0)} never"
        )
