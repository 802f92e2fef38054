"""Hypothesis strategies of programs, made of the table of features."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .features import ARM, EVENTS, SCRIPT, STEPS, TUNED_STEPS, EventFeature, Feature
from .laws import fit
from .pairs import ANY, Wanted
from .program import Choices, Event, Program

# In how many of ten programs, or of its features, something is drawn: from nearly nothing to nearly all at once.
DENSITIES = (1, 2, 4)
MOST_EVENTS = 5
_NOTHING = Wanted()


@st.composite
def programs(draw: st.DrawFn, ranks: int, wanted: Wanted = _NOTHING, tuned: bool = False) -> Program:
    """Programs on so many ranks.

    Args:
        draw: given by hypothesis.
        ranks: world size.
        wanted: what every program, and each of its arms, has.
        tuned: whether arms find their plans by themselves, in `TUNED_STEPS` steps.
    """
    density = draw(st.sampled_from(DENSITIES))
    script = _choices(draw, SCRIPT, density, wanted)
    arms = [
        _choices(draw, ARM, density, wanted, beside=script) | ({"tuned": True} if tuned else {})
        for _ in range(1 if tuned else draw(st.integers(1, 2)))
    ]
    steps = TUNED_STEPS if tuned else STEPS
    events = [_event(draw, event, script, ranks, steps) for event in EVENTS if event.name in wanted.events]
    for _ in range(draw(st.integers(0, MOST_EVENTS))):
        events.append(_event(draw, draw(st.sampled_from(EVENTS)), script, ranks, steps))
    kept = tuple(sorted((event for event in events if event), key=lambda event: (event.step, event.place, event.name)))
    return fit(Program(ranks, draw(st.integers(0, 99)), steps, script, tuple(arms), kept))


def _choices(
    draw: st.DrawFn, table: tuple[Feature, ...], density: int, wanted: Wanted, beside: Choices | None = None
) -> dict[str, Any]:
    chosen: dict[str, Any] = dict(beside or {})
    before = set(chosen)
    fixed = wanted.script if table is SCRIPT else wanted.arm
    for feature in table:
        if feature.name in fixed:
            is_any = fixed[feature.name] == ANY
            chosen[feature.name] = draw(st.sampled_from(feature.values[1:])) if is_any else fixed[feature.name]
            continue
        if draw(st.integers(0, 9)) < 10 - density * feature.often:
            continue
        value = draw(st.sampled_from(feature.values))
        # Asked only now: a feature that another forbids must not shift what is drawn next, or shrinking gets stuck.
        if value == feature.values[0] or feature.without(chosen):
            continue
        if not wanted.is_refused({**chosen, feature.name: value}, chosen):
            chosen[feature.name] = value
    return {name: value for name, value in chosen.items() if name not in before}


def _event(draw: st.DrawFn, feature: EventFeature, script: Choices, ranks: int, steps: int) -> Event | None:
    step = draw(st.integers(0, steps - 1))
    place = draw(st.sampled_from(feature.places))
    rank = draw(st.sampled_from((None, *range(ranks)))) if feature.by_one else None
    return None if feature.without(script) else Event(step, place, feature.name, rank)
