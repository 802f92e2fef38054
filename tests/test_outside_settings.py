"""What of the code of optimizers counts as reading a setting from elsewhere."""

from __future__ import annotations

import enum
import functools
import logging
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from ddp_crossover.optim.optimizer_snapshot import hyperparameters
from ddp_crossover.optim.outside_settings import changeable_setting

EPS = 1e-8
BETAS = (0.9, (0.99, "x"))
RATES = {"lr": 0.1}
WEIGHT = torch.ones(1)
OBJECT = SimpleNamespace(lr=0.1)
MODULE = ModuleType("settings_of_a_user")
MODULE.lr = 0.1
BOUND = RATES.get
ITEM = RATES.__getitem__
LENGTH = RATES.__len__
PARTIAL = functools.partial(pow, 2)
PARTIAL_OF_DATA = functools.partial(pow, RATES)
TUPLE_OF_DATA = (1, RATES)
_memo: dict[int, float] = {}
_hidden = {"lr": 0.1}
rebound = 0.1
logger = logging.getLogger(__name__)


def rebind() -> None:
    def really() -> None:
        global rebound
        rebound *= 0.5

    really()


def set_hidden(value: float) -> None:
    _hidden["lr"] = value


class Kind(enum.Enum):
    PLAIN = "plain"


class Config:
    lr = 0.1

    @classmethod
    def rate(cls) -> float:
        return RATES["lr"]


class Base(Optimizer):
    lr = 0.1
    rates: ClassVar[list[float]] = [0.1]

    def __init__(self) -> None:
        super().__init__([torch.zeros(1, requires_grad=True)], {"lr": RATES["lr"], "rate": rebound})
        self.own = 0.1

    def state_dict(self) -> dict[str, Any]:
        return RATES

    @property
    def rate(self) -> float:
        return RATES["lr"]

    @staticmethod
    def constant() -> float:
        return EPS

    def from_global(self) -> float:
        return RATES["lr"]


class FromBase(Base):
    own = 0.1


def _memoized() -> float:
    return _memo.setdefault(1, 0.1)


def _helper() -> float:
    return sum(RATES["lr"] for _ in range(1))


@functools.lru_cache
def _cached() -> float:
    return WEIGHT.item()


def _scaled(by: float) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call() -> Any:
            return by * function()

        return call

    return decorate


def _scaled_by_what_changes(by: float) -> Callable[[], float]:
    by = 2 * by
    return lambda: by


@_scaled(2.0)
def _decorated() -> float:
    return math.sqrt(EPS)


@_scaled(2.0)
def _decorated_helper() -> float:
    return _helper()


_late = _scaled_by_what_changes(1.0)


def _with_data(rates: Any = RATES) -> None:
    return rates


def _with_number(rate: float = 0.1, *, other: float = 0.1) -> float:
    return rate * other


def _closure_over(value: Any) -> Callable[[], Any]:
    return lambda: value


_over_number, _over_list, _over_function = _closure_over(0.1), _closure_over([0.1]), _closure_over(_helper)


def _made_before_its_variable() -> tuple[Any, Any]:
    def set_it() -> None:
        nonlocal later
        later = 1

    if False:
        later = 0
    return (lambda: later), set_it


_before, _set_later = _made_before_its_variable()

HARMLESS: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda self: EPS * BETAS[0] * math.pi * self.own,
    "torch": lambda self: torch.float32 if torch.is_grad_enabled() else torch.zeros(1).add_(1),
    "enum": lambda self: Kind.PLAIN.value,
    "builtin": lambda self: max(len(self.param_groups), 1),
    "logger": lambda self: logger.info("stepped"),
    "memo": lambda self: _memoized(),
    "decorated": lambda self: _decorated(),
    "partial": lambda self: PARTIAL(3),
    "default": lambda self: _with_number(),
    "argument": lambda self: _over_number(),
    "method": lambda self: self.constant(),
    "unknown": lambda self: no_such_thing,  # noqa: F821
}
CHANGEABLE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "dict": ("global variable RATES", lambda self: RATES["lr"]),
    "tensor": ("global variable WEIGHT", lambda self: WEIGHT),
    "object": ("global variable OBJECT", lambda self: OBJECT.lr),
    "tuple": ("global variable TUPLE_OF_DATA", lambda self: TUPLE_OF_DATA),
    "partial": ("global variable PARTIAL_OF_DATA", lambda self: PARTIAL_OF_DATA(1)),
    "bound": ("global variable BOUND", lambda self: BOUND("lr")),
    "item": ("global variable ITEM", lambda self: ITEM("lr")),
    "slot": ("global variable LENGTH", lambda self: LENGTH()),
    "rebound": ("global variable rebound", lambda self: rebound),
    "private": ("global variable _hidden", lambda self: _hidden["lr"]),
    "module": ("settings_of_a_user.lr", lambda self: MODULE.lr),
    "class": ("Config.lr", lambda self: Config.lr),
    "classmethod": ("global variable RATES", lambda self: Config.rate()),
    "helper": ("global variable RATES", lambda self: _helper()),
    "cached": ("global variable WEIGHT", lambda self: _cached()),
    "decorated": ("global variable RATES", lambda self: _decorated_helper()),
    "inner": ("global variable RATES", lambda self: [RATES[k] for k in "x"]),
    "default": ("default argument of _with_data", lambda self: _with_data()),
    "list in a closure": ("value of an enclosing function", lambda self: _over_list()),
    "function in a closure": ("global variable RATES", lambda self: _over_function()),
    "number in a closure": ("by of an enclosing function", lambda self: _late()),
    "empty cell": ("later of an enclosing function", lambda self: _before()),
    "class attribute": ("class attribute Base.lr", lambda self: self.__class__.lr),
    "list of the class": ("class attribute Base.rates", lambda self: self.rates),
    "property": ("global variable RATES", lambda self: self.rate),
    "method": ("global variable RATES", lambda self: self.from_global()),
}


def _optimizer(read: Callable[[Any], Any], base: type = Base) -> Optimizer:
    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        return read(self)

    return type("Mine", (base,), {"step": step})()


@pytest.mark.parametrize("name", HARMLESS)
def test_what_stays_as_it_is_does_not_count(name: str) -> None:
    assert changeable_setting(_optimizer(HARMLESS[name])) is None


@pytest.mark.parametrize("name", CHANGEABLE)
def test_what_may_change_is_named(name: str) -> None:
    expected, read = CHANGEABLE[name]
    found = changeable_setting(_optimizer(read))
    assert found is not None and expected in found


def test_what_the_optimizer_has_itself_hides_what_its_class_has() -> None:
    assert changeable_setting(_optimizer(lambda self: self.own, FromBase)) is None


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_optimizers_of_torch_read_nothing_from_elsewhere(kind: type) -> None:
    assert changeable_setting(kind([torch.zeros(1)], lr=0.1)) is None
    assert changeable_setting(type("Mine", (kind,), {})([torch.zeros(1)], lr=0.1)) is None


def test_numbers_of_the_main_script_may_change() -> None:
    script: dict[str, Any] = {"__name__": "__main__", "lr": 0.1, "exp": math.exp}
    exec("def rate(self):\n    return exp(lr)", script)
    assert changeable_setting(_optimizer(script["rate"])) == "the global variable lr"
    exec("def rate(self):\n    return exp(1)", script)
    assert changeable_setting(_optimizer(script["rate"])) is None


def test_a_variable_that_is_no_argument_may_change() -> None:
    lr = 0.1
    assert changeable_setting(_optimizer(lambda self: lr)) == "lr of an enclosing function"


def test_hyperparameters_are_copied_as_deep_as_they_go() -> None:
    Pair = namedtuple("Pair", "one two")
    weight = torch.ones(2)
    group = {"a": {"b": [1, {"c": {2}}]}, "pair": Pair([1], 2), "ordered": OrderedDict(x=[weight]), "params": []}
    copied = hyperparameters(group)
    group["a"]["b"][1]["c"].add(3)
    group["a"]["b"][0] = 0
    group["pair"].one[0] = 0
    weight.zero_()
    assert copied["a"] == {"b": [1, {"c": {2}}]}
    assert copied["pair"] == Pair([1], 2) and type(copied["pair"]) is Pair
    assert type(copied["ordered"]) is OrderedDict and copied["ordered"]["x"][0].equal(torch.ones(2))
