"""Answers of trials are remembered for torch's own optimizers, for as long as nothing that they depend on changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import GeneratorType
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from ddp_crossover.watching.separability import ask, why_not_separable
from own_optimizers import OwnOptimizer, SlowsDown


class OwnSGD(SGD):
    """Somebody's own, which may do anything."""


def _asked(*optimizers: Optimizer) -> int:
    """How many trials it takes to ask about these optimizers, one after the other."""
    trials = 0

    def question(optimizer: Optimizer, with_state: bool) -> str | None:
        nonlocal trials
        trials += 1
        torch.rand(3)
        random.random()
        return type(optimizer).__name__

    assert [ask(question, one, str) for one in optimizers] == [type(one).__name__ for one in optimizers]
    return trials


def _parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype, requires_grad=True) for size in sizes]


@pytest.mark.parametrize(
    ("make", "trials"),
    [
        (lambda: [SGD(_parameters(2), lr=0.1), SGD(_parameters(9, 4), lr=0.2)], 1),
        (lambda: [SGD(_parameters(2), lr=0.1), Adam(_parameters(2), lr=0.1)], 2),
        (lambda: [SGD(_parameters(2), lr=0.1, momentum=m) for m in (0.0, 0.9)], 2),
        (lambda: [SGD(_parameters(2, dtype=dtype), lr=0.1) for dtype in (torch.float32, torch.float64)], 2),
        (lambda: [SGD([torch.zeros(shape, requires_grad=True)], lr=0.1) for shape in ((2,), (2, 2))], 2),
        (lambda: [OwnSGD(_parameters(2), lr=0.1) for _ in range(2)], 2),
    ],
    ids=["alike", "another class", "other settings", "another dtype", "other dimensions", "not torch's"],
)
def test_what_has_been_answered_is_not_tried_again(make: Callable[[], list[Any]], trials: int) -> None:
    assert _asked(*make()) == trials


def test_an_optimizer_that_keeps_numbers_alone_is_separable() -> None:
    assert why_not_separable(SlowsDown(_parameters(3, 2))) is None


class ByPlace(OwnSGD):
    """Adds signs, times a rate that depends on the place of a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"] * 0.9**place)


@pytest.mark.parametrize("lr", [0.1, 1e-5, 1e-9, 1e-15, 0.0])
def test_places_are_seen_at_the_learning_rate_of_a_warm_up(lr: float) -> None:
    assert "does not update each parameter independently" in str(why_not_separable(ByPlace(_parameters(3, 2), lr=lr)))


class Tables(OwnSGD):
    """Keeps numbers that all parameters share, in an attribute."""

    def __init__(self, params: Any, names: Any = ()) -> None:
        super().__init__(params, lr=0.1)
        self.table = {0}
        self.names = names

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            steps = self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            if not isinstance(self.names, GeneratorType):
                self.table.add(steps)
            p.sub_(p.grad)


def test_what_came_out_otherwise_is_named() -> None:
    assert "gave other values of its attribute .table" in (why_not_separable(Tables(_parameters(3, 3))) or "")


class Placed(OwnSGD):
    """Has six coefficients, for as many parameters."""

    def __init__(self, coefficients: Any, *, by_place: bool) -> None:
        super().__init__(_parameters(*[2] * 6), lr=0.1)
        self.coefficients, self.by_place = coefficients, by_place

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for index, p in enumerate(self.param_groups[0]["params"]):
            p.sub_(p.grad, alpha=self.coefficients[index] if self.by_place else sum(self.coefficients))


@pytest.mark.parametrize("by_place", [False, True])
def test_a_trial_shows_whether_entries_that_differ_belong_to_places(by_place: bool) -> None:
    found = why_not_separable(Placed((0.1, 0.2, 0.3, 0.3, 0.3, 0.3), by_place=by_place))
    assert ("gave other values of its parameters" in (found or "")) is by_place
    assert "by its place" in (why_not_separable(Placed((0.1,) * 6, by_place=by_place)) or "")


def test_a_generator_that_has_ended_holds_nothing() -> None:
    names = (each for each in "ab")
    optimizer = Tables(_parameters(3, 3), names)
    assert ".names may hold parameters" in (why_not_separable(optimizer) or "")
    assert list(names)
    assert why_not_separable(optimizer) is None


def test_a_trial_that_fails_without_state_is_made_with_it_and_not_remembered() -> None:
    seen = []

    def question(optimizer: Optimizer, with_state: bool) -> str | None:
        seen.append(with_state)
        if not with_state:
            raise KeyError("sum")
        return None

    optimizer = SGD(_parameters(2), lr=0.1)
    for _ in range(2):
        assert ask(question, optimizer, str) is None
    assert seen == [False, True] * 2
    assert ask(lambda *_: 1 / 0, optimizer, lambda error: type(error).__name__) == "ZeroDivisionError"  # type: ignore[arg-type,return-value]


def _reads(names: Any, parameters: list[torch.Tensor]) -> Optimizer:
    class Reads(OwnOptimizer):
        def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
            for p in parameters:
                p.add_(p.grad, alpha=-0.1 if id(p) in names or str(id(p)) in names else -0.5)

    return Reads(parameters)


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset, lambda ids: list(map(str, ids))])
def test_ids_of_parameters_are_found_outside_of_the_optimizer(kind: Callable[[list[int]], Any]) -> None:
    parameters = _parameters(3, 3, 3, 3)
    assert "stores the id() of parameters" in (why_not_separable(_reads(kind([id(parameters[0])]), parameters)) or "")
    assert why_not_separable(_reads(kind([1, 2]), parameters)) is None


def test_a_copy_of_a_set_that_has_another_order_is_no_change() -> None:
    draws = random.Random(0)
    sets = ({draws.randrange(2**40) for _ in range(9)} for _ in range(1000))
    names = next(each for each in sets if list(copy.deepcopy(each)) != list(each))
    assert why_not_separable(_reads(names, _parameters(3, 3, 3, 3))) is None
