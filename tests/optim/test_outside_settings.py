"""What of the code of optimizers counts as reading a setting from elsewhere."""

from __future__ import annotations

import enum
import functools
import logging
import math
import os
import types
from abc import ABCMeta
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
INTEGER = 1
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


class Scaling:
    def __call__(self) -> float:
        return RATES["lr"]


class Configured:
    def __init__(self) -> None:
        self.made = RATES["lr"]


class FromConfigured(Configured):
    pass


class OfKind(enum.Enum):
    PLAIN = "plain"

    def scale(self) -> float:
        return RATES["lr"]


class Meta(type):
    def __new__(cls, *args: Any) -> Any:
        RATES["classes"] = 1.0
        return super().__new__(cls, *args)

    @property
    def of_class(cls) -> float:
        return RATES["lr"]


class Base(Optimizer):
    factor = 0.1
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


@functools.singledispatch
def _rule(value: Any) -> float:
    return 0.1


@_rule.register
def _(value: torch.Tensor) -> float:
    return RATES["lr"]


def _with_attribute() -> float:
    return EPS


_with_attribute.made = 0.1  # type: ignore[attr-defined]


def _importing() -> Any:
    import settings_of_a_user

    return settings_of_a_user


def _importing_from_torch() -> Any:
    from math import pi

    import torch.nn.functional as functional

    return functional.relu(pi)


def _through_a_local() -> Any:
    module = MODULE
    return module.lr


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
_over_module = _closure_over(MODULE)


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
    "attribute of the optimizer": lambda self: getattr(self, "own", 0.1),
    "import from torch": lambda self: _importing_from_torch(),
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
    "class attribute": ("class attribute Base.factor", lambda self: self.__class__.factor),
    "list of the class": ("class attribute Base.rates", lambda self: self.rates),
    "property": ("global variable RATES", lambda self: self.rate),
    "method": ("global variable RATES", lambda self: self.from_global()),
    "call of an object": ("global variable RATES", lambda self: Scaling()()),
    "making of an object": ("global variable RATES", lambda self: Configured().made),
    "making of an heir": ("global variable RATES", lambda self: FromConfigured().made),
    "method of an enum": ("global variable RATES", lambda self: OfKind.PLAIN.scale()),
    "getattr": ("class attribute Base.factor", lambda self: getattr(self, "factor", 1.0)),
    "getattr in a loop": ("class attribute Base.factor", lambda self: [getattr(self, x) for x in ("own", "factor")]),
    "environ": ("attribute os.environ", lambda self: os.environ["RATE"]),
    "getenv": ("global variable environ", lambda self: os.getenv("RATE")),
    "module in a local": ("attribute settings_of_a_user.lr", lambda self: _through_a_local()),
    "module in a closure": ("attribute settings_of_a_user.lr", lambda self: _over_module().lr),
    "import": ("module settings_of_a_user", lambda self: _importing()),
    "singledispatch": ("global variable RATES", lambda self: _rule(INTEGER)),
    "attribute of a function": ("attribute _with_attribute.made", lambda self: _with_attribute.made),
}


def _optimizer(read: Callable[[Any], Any], base: type = Base) -> Optimizer:
    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        return read(self)

    return type("Mine", (base,), {"step": step})()


@pytest.mark.parametrize("name", HARMLESS)
def test_what_stays_as_it_is_does_not_count(name: str) -> None:
    assert changeable_setting(_optimizer(HARMLESS[name])) is None


def test_what_a_framework_puts_into_the_class_of_loggers_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "advise", lambda self: RATES["lr"], raising=False)
    assert changeable_setting(_optimizer(HARMLESS["logger"])) is None


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


def _from_global(self: Any, closure: Any = None) -> float:
    return RATES["lr"]


def _without_a_name() -> type:
    variables: dict[str, Any] = {"Base": SGD}
    exec("RATES = {}\nclass Mine(Base):\n    def step(self, closure=None):\n        return RATES['lr']", variables)
    return variables["Mine"]


NAMED_AS_TRUSTED: dict[str, Callable[[], type]] = {
    "builtins": _without_a_name,
    "types": lambda: types.new_class("Mine", (SGD,), {}, lambda members: members.update(step=_from_global)),
    "abc": lambda: ABCMeta("Mine", (SGD,), {"step": _from_global}),
}


@pytest.mark.parametrize("module", NAMED_AS_TRUSTED)
def test_classes_of_users_may_bear_the_name_of_a_trusted_module(module: str) -> None:
    kind = NAMED_AS_TRUSTED[module]()
    kind.__module__ = module
    assert changeable_setting(kind([torch.zeros(1)], lr=0.1)) == "the global variable RATES"


@pytest.mark.parametrize("name", ["step", "_init_group"])
def test_functions_put_in_classes_of_torch_are_searched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SGD, name, torch.no_grad()(_from_global))
    assert changeable_setting(SGD([torch.zeros(1)], lr=0.1)) == "the global variable RATES"


def test_what_python_calls_without_naming_it_is_searched() -> None:
    def ask(self: Any, name: str) -> float:
        return RATES[name]

    assert changeable_setting(type("Mine", (SGD,), {"__getattr__": ask})([torch.zeros(1)])) is not None


def test_a_metaclass_may_read_what_changes() -> None:
    kind = Meta("Mine", (FromBase,), {"step": lambda self, closure=None: self.own})
    assert changeable_setting(kind()) is None
    kind = Meta("Mine", (FromBase,), {"step": lambda self, closure=None: type(self).of_class})
    assert changeable_setting(kind()) == "the global variable RATES"


def test_what_the_optimizer_has_itself_does_not_hide_what_others_have() -> None:
    optimizer = _optimizer(lambda self: Config.lr)
    optimizer.lr = 0.1
    assert changeable_setting(optimizer) == "the class attribute Config.lr"


def test_chains_of_calls_may_be_long() -> None:
    chain: dict[str, Any] = {"__name__": "chain_of_a_user", "rates": RATES}
    exec("def last(self):\n    return rates['lr']\nstep0 = last", chain)
    exec("".join(f"def step{i}(self):\n    return step{i - 1}(self)\n" for i in range(1, 2000)), chain)
    assert changeable_setting(_optimizer(chain["step1999"])) == "the global variable rates"


def test_numbers_of_the_main_script_may_change() -> None:
    script: dict[str, Any] = {"__name__": "__main__", "lr": 0.1, "exp": math.exp}
    exec("def rate(self):\n    return exp(lr)", script)
    assert changeable_setting(_optimizer(script["rate"])) == "the global variable lr"
    exec("def rate(self):\n    return exp(1)", script)
    assert changeable_setting(_optimizer(script["rate"])) is None


def _module(*lines: str) -> dict[str, Any]:
    variables: dict[str, Any] = {"__name__": "module_of_a_user", "lr": 0.1, "find": changeable_setting}
    variables |= {"optimizer": _optimizer, "found": ""}
    exec("\n".join(("def rate(self):\n    return lr", *lines)), variables)
    return variables


def test_numbers_of_a_module_may_change_while_its_lines_run() -> None:
    variables = _module("found = find(optimizer(rate))")
    assert variables["found"] == "the global variable lr"
    assert changeable_setting(_optimizer(variables["rate"])) is None


def test_numbers_of_a_module_may_change_by_globals() -> None:
    variables = _module("def halve():\n    globals()['lr'] *= 0.5")
    assert changeable_setting(_optimizer(variables["rate"])) == "the global variable lr"


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
