"""What a script keeps a reference to and has put into its optimizer, and changes by it right after `step()`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from changed_after_step import train_both_ways
from ddp_crossover.watching.lazy_state import make_state_lazy
from ddp_crossover.watching.state_entries import entries_of_state
from own_optimizers import OwnOptimizer


class Config:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Held(NamedTuple):
    """How a kind of object is made, read and changed."""

    make: Callable[[float], Any]
    read: Callable[[Any], float]
    change: Callable[[Any, float], object]


def _first(value: Any) -> float:
    return float(value[0])


def _set_first(value: Any, scale: float) -> None:
    value[0] = scale


def _set_scale(value: Any, scale: float) -> None:
    value.scale = scale


KINDS = {
    "object": Held(Config, lambda value: value.scale, _set_scale),
    "slots": Held(Slotted, lambda value: value.scale, _set_scale),
    "list": Held(lambda scale: [scale], _first, _set_first),
    "dict": Held(lambda scale: {0: scale}, _first, _set_first),
    "deque": Held(lambda scale: deque([scale]), _first, _set_first),
    "array": Held(lambda scale: torch.tensor([scale]).numpy(), _first, _set_first),
    "parameter": Held(  # of a model that follows, say
        lambda scale: torch.nn.Parameter(torch.tensor([scale]), requires_grad=False), _first, _set_first
    ),
    "inner": Held(lambda scale: ([0.0, Config(scale)],), lambda v: v[0][1].scale, lambda v, s: _set_scale(v[0][1], s)),
}


class ReadsState(OwnOptimizer):
    read: Any = staticmethod(float)

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * group["read"](self.state[p]["cfg"]))


class ReadsGroup(OwnOptimizer):
    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * group["read"](group["cfg"]))


def _begin(parameters: list[Any], place: str, kind: str) -> tuple[Any, Callable[[float], object]]:
    held, kept = KINDS[kind], []

    def make() -> Any:
        kept.append(held.make(0.5))
        return kept[-1]

    if place == "group":
        optimizer: Any = ReadsGroup(parameters, read=held.read, cfg=make())
    else:
        optimizer = ReadsState(parameters, read=held.read)
        one = make() if place == "one" else None
        for p in parameters:
            optimizer.state[p]["cfg"] = make() if one is None else one
    if place == "nobody":
        kept.clear()

    def change(scale: float) -> None:
        for each in kept:
            held.change(each, scale)

    return optimizer, change


def _compare(place: str) -> None:
    for kind in KINDS:
        stats = train_both_ways(partial(_begin, place=place, kind=kind), kind)
        if kind != "slots":  # which a trial cannot compare
            assert place != "nobody" or not stats.fallbacks, (kind, stats.fallbacks)
            assert place != "each" or any("something else refers" in reason for reason in stats.fallbacks), kind


@pytest.mark.parametrize("place", ["each", "one", "group", "nobody"])
def test_training_has_the_bits_of_plain_ddp(on_ranks, place: str) -> None:
    on_ranks(_compare, 2, place)


def _stepped() -> Any:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3)) for _ in range(3)])
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones(3)
    optimizer.step()
    make_state_lazy(optimizer, "model")
    return optimizer


def _held_after_some_steps(optimizer: Any) -> Any:
    for _ in range(100):
        held = entries_of_state(optimizer).held
    return held


@pytest.mark.quick
def test_what_only_the_state_refers_to_is_not_held() -> None:
    optimizer = _stepped()
    node: Any = Config(0.5)
    node.itself, node.pair = node, (node, [node])
    optimizer.state[optimizer.param_groups[0]["params"][1]]["cfg"] = node
    assert len(entries_of_state(optimizer).held) == 1
    del node
    assert not _held_after_some_steps(optimizer)


@pytest.mark.quick
def test_a_checkpoint_that_a_script_keeps_holds_nothing() -> None:
    optimizer = _stepped()
    kept = optimizer.state_dict()
    tensors = [list(entry.values()) for entry in kept["state"].values()]
    assert not entries_of_state(optimizer).held and tensors
