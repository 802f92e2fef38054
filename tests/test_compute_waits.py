"""A wait of compute is told to those who measure compute, and others may use the device in it."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_crossover.compute_waits import ComputeWaits, NoOtherJobs
from ddp_crossover.moments import Follower, Followers

pytestmark = pytest.mark.quick


class Stopwatch(Follower):
    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    @contextlib.contextmanager
    def waiting(self, what: Hashable) -> Iterator[None]:
        self.heard.append(f"stops in {what}")
        try:
            yield
        finally:
            self.heard.append("goes on")


class Sharing(NoOtherJobs):
    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    @contextlib.contextmanager
    def gap(self, what: Hashable, last_has_arrived: Any = None) -> Iterator[Any]:
        self.heard.append(f"gap {what}")
        yield "polled"
        self.heard.append("turn")


def test_the_stopwatch_stands_still_until_it_is_our_turn_again() -> None:
    heard: list[str] = []
    moments: Any = SimpleNamespace(inside=Followers())
    waits = ComputeWaits(moments, Sharing(heard))
    with waits.of(1) as polled:
        assert polled == "polled"
    moments.inside.wrap(Stopwatch(heard))
    with waits.of(2) as polled:
        assert polled == "polled"
    assert heard == ["gap 1", "turn", "stops in 2", "gap 2", "turn", "goes on"]


def test_the_stopwatch_goes_on_if_a_wait_fails() -> None:
    heard: list[str] = []
    moments: Any = SimpleNamespace(inside=Followers())
    moments.inside.wrap(Stopwatch(heard))
    with contextlib.suppress(ZeroDivisionError), ComputeWaits(moments, NoOtherJobs()).of(1) as polled:
        assert polled is None
        1 / 0  # noqa: B018
    assert heard == ["stops in 1", "goes on"]
