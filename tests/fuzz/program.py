"""A training program as a small value that JSON can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Choices = Mapping[str, Any]
"""Features by name, only those that are not at their default."""


@dataclass(frozen=True)
class Event:
    """Something that a script does once.

    Attributes:
        step: in which step, from 0.
        place: `begin` (before the step), `gradients` (after backward), `clipped` (before `optimizer.step()`), `stepped`
            (after it).
        name: a name in `events.EVENTS`.
        rank: the only rank that does it; None for all.
    """

    step: int
    place: str
    name: str
    rank: int | None = None


@dataclass(frozen=True)
class Program:
    """A training script, and the options of `attach` with which it must agree with plain DDP.

    Attributes:
        ranks: world size.
        seed: of weights, batches, and of what events draw.
        steps: optimizer steps.
        script: what the script does, by features of the kind `script`.
        arms: what each attached run passes to `attach`, by features of the kind `arm`.
        events: what happens on the way.
    """

    ranks: int = 2
    seed: int = 0
    steps: int = 9
    script: Choices = field(default_factory=dict)
    arms: tuple[Choices, ...] = field(default_factory=lambda: ({},))
    events: tuple[Event, ...] = ()

    def to_json(self) -> str:
        """One line."""
        return json.dumps(
            {
                "ranks": self.ranks,
                "seed": self.seed,
                "steps": self.steps,
                "script": dict(self.script),
                "arms": [dict(arm) for arm in self.arms],
                "events": [
                    [event.step, event.place, event.name, *([] if event.rank is None else [event.rank])]
                    for event in self.events
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Program:
        """What `to_json` has returned; other keys, as a note of what it showed, are left aside."""
        read = json.loads(text)
        return cls(
            read["ranks"],
            read["seed"],
            read["steps"],
            read["script"],
            tuple(read["arms"]),
            tuple(Event(*event) for event in read["events"]),
        )

    def with_arm(self, arm: Choices) -> Program:
        """The same script with one arm only."""
        return replace(self, arms=(arm,))
