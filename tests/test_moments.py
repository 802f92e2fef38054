"""Followers hear of the moments of training in one order, and nothing is hooked for moments that nobody follows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.moments import BeforeBackward, Follower, Followers, Moments

pytestmark = pytest.mark.quick

Heard = list[str]


class Everything(Follower):
    def __init__(self, name: str, heard: Heard) -> None:
        self.name = name
        self.heard = heard

    def note(self, what: str) -> None:
        self.heard.append(f"{self.name}: {what}")

    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        self.note("forward begins")

    def compute_begins(self) -> None:
        self.note("compute begins")

    def forward_ends(self, ddp: DistributedDataParallel, output: Any, before_backward: BeforeBackward) -> None:
        self.note("forward raised" if output is None else "forward ends")
        before_backward(lambda: self.note("backward begins"))

    def bucket_arrives(self, parameters: Sequence[torch.Tensor], *, is_first: bool) -> None:
        self.note("the first bucket arrives" if is_first else "a bucket arrives")

    def backward_ends(self) -> None:
        self.note("backward ends")

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self.note("step begins")

    def step_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self.note("step ends")

    @contextlib.contextmanager
    def waiting(self, what: object) -> Iterator[None]:
        self.note(f"wait for {what}")
        yield
        self.note("wait ends")


class OfSteps(Follower):
    def __init__(self) -> None:
        self.ends = 0

    def step_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self.ends += 1


def _hooks(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    of_modules = {
        name: len(hooks)
        for name, hooks in {
            "call begins": ddp._forward_pre_hooks,
            "call ends": ddp._forward_hooks,
            "compute begins": ddp.module._forward_pre_hooks,
        }.items()
    }
    of_steps = {"step begins": optimizer._optimizer_step_pre_hooks, "step ends": optimizer._optimizer_step_post_hooks}
    return of_modules | {name: len(hooks) for name, hooks in of_steps.items()}


def _job() -> tuple[DistributedDataParallel, torch.optim.Optimizer, Moments]:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return ddp, optimizer, Moments(ddp, [optimizer])


def _order_in_a_step() -> Heard:
    ddp, optimizer, moments = _job()
    heard: Heard = []
    ddp.register_forward_pre_hook(lambda *_: heard.append("the user's pre-hook"), prepend=True)
    ddp.register_forward_hook(lambda *_: heard.append("the user's hook"))
    ddp.module.register_forward_hook(lambda *_: heard.append("compute"))
    lease = Everything("inner", heard)
    moments.follow(lease)
    moments.follow(Everything("outer", heard))
    ddp(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    moments.leave(lease)
    optimizer.step()
    return heard


def test_those_around_hear_of_the_whole_and_nest(on_ranks) -> None:
    [heard] = on_ranks(_order_in_a_step, 1)
    assert heard == [
        "outer: forward begins",
        "inner: forward begins",
        "the user's pre-hook",
        "outer: compute begins",
        "inner: compute begins",
        "compute",
        "the user's hook",
        "inner: forward ends",
        "outer: forward ends",
        "inner: backward begins",
        "outer: backward begins",
        "outer: step begins",
        "inner: step begins",
        "inner: step ends",
        "outer: step ends",
        "outer: step begins",
        "outer: step ends",
    ]


def _order_of_what_the_reducer_tells() -> Heard:
    ddp, _, moments = _job()
    heard: Heard = []
    for name, inside in {"weights": True, "lease": False, "stopwatch": True}.items():
        moments.follow(Everything(name, heard), inside=inside)
    moments.inside.forward_begins(ddp)
    moments.bucket_arrives([], is_first=True)
    moments.inside.backward_ends()
    moments.around.backward_ends()
    return heard


def test_what_measures_compute_hears_of_begins_last_and_of_ends_first(on_ranks) -> None:
    [heard] = on_ranks(_order_of_what_the_reducer_tells, 1)
    assert heard == [
        "weights: forward begins",
        "stopwatch: forward begins",
        "lease: the first bucket arrives",
        "weights: the first bucket arrives",
        "stopwatch: the first bucket arrives",
        "stopwatch: backward ends",
        "weights: backward ends",
        "lease: backward ends",
    ]


def _a_forward_that_raises() -> Heard:
    ddp, _, moments = _job()
    heard: Heard = []
    moments.follow(Everything("one", heard))
    with contextlib.suppress(RuntimeError):
        ddp(torch.ones(1, 4))
    return heard


def test_the_end_of_a_forward_that_raises_is_told(on_ranks) -> None:
    [heard] = on_ranks(_a_forward_that_raises, 1)
    assert heard == ["one: forward begins", "one: compute begins", "one: forward raised"]


def _hooks_with_followers() -> list[dict[str, int]]:
    ddp, optimizer, moments = _job()
    seen = [_hooks(ddp, optimizer)]
    everything, of_steps = Everything("one", []), OfSteps()
    for change in (moments.follow, moments.leave):
        for follower in (of_steps, everything):
            change(follower)
            seen.append(_hooks(ddp, optimizer))
    optimizer.step()
    assert not of_steps.ends and not everything.heard
    return seen


def test_hooks_are_there_only_while_somebody_follows(on_ranks) -> None:
    [[before, with_steps, with_all, with_everything, after]] = on_ranks(_hooks_with_followers, 1)
    assert not any(before.values()) and after == before
    assert with_steps == before | {"step begins": 1, "step ends": 1}
    assert with_all == with_everything == dict.fromkeys(before, 1)


def test_waits_nest_as_well_and_cost_nothing_if_nobody_is_told() -> None:
    heard: Heard = []
    followers = Followers()
    assert followers.waiting("a leg") is followers.waiting("another")
    followers.wrap(Everything("inner", heard))
    followers.wrap(OfSteps())
    followers.wrap(Everything("outer", heard))
    followers.fill(Everything("innermost", heard))
    with followers.waiting(3):
        heard.append("wait")
    followers.backward_ends()
    assert heard == [
        "outer: wait for 3",
        "inner: wait for 3",
        "innermost: wait for 3",
        "wait",
        "innermost: wait ends",
        "inner: wait ends",
        "outer: wait ends",
        "innermost: backward ends",
        "inner: backward ends",
        "outer: backward ends",
    ]
