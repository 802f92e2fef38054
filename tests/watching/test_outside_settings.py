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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import get_rank
from torch.optim import SGD, Adam, Optimizer

from ddp_crossover.watching.optimizer_snapshot import hyperparameters
from ddp_crossover.watching.outside_settings import outside

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
NAMES = ["own", "factor"]
LONG = list(range(2000))
TABLE: dict[Any, Any] = {torch.ops.aten.add: {"scale": lambda: RATES["lr"], int: math.sqrt}}
TABLE_OF_DATA = {"rate": RATES.get}
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


CONFIGURED = Config()
CONFIGURED.decay = 0.1  # type: ignore[attr-defined]


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


def _importing_files() -> Any:
    import pathlib

    return pathlib.Path("rate").read_text()


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
    "constants of Python": lambda self: (NotImplemented, Ellipsis),
    "unknown": lambda self: no_such_thing,  # noqa: F821
}
Change = Callable[[], None]


def _set(holder: Any, name: str, value: Any) -> Change:
    return lambda: holder.__setitem__(name, value) if isinstance(holder, dict) else setattr(holder, name, value)


HERE = globals()
HALF: Change = _set(RATES, "lr", 0.05)
FOLLOWED: dict[str, tuple[str, Callable[[Any], Any], Change]] = {
    "number": ("global variable EPS", lambda self: EPS, _set(HERE, "EPS", 1e-4)),
    "number of another type": ("global variable INTEGER", lambda self: INTEGER, _set(HERE, "INTEGER", True)),
    "tuple": ("global variable BETAS", lambda self: BETAS, _set(HERE, "BETAS", (0.9, (0.9, "x")))),
    "dict": ("global variable RATES", lambda self: RATES["lr"], HALF),
    "key of a dict": ("global variable RATES", lambda self: RATES["lr"], _set(RATES, "other", 0.1)),
    "table": ("global variable TABLE", lambda self: TABLE, lambda: TABLE[torch.ops.aten.add].update(scale=_helper)),
    "function in a table": ("global variable RATES", lambda self: TABLE, HALF),
    "rebound": ("global variable rebound", lambda self: rebound, rebind),
    "private": ("global variable _hidden", lambda self: _hidden["lr"], lambda: set_hidden(0.2)),
    "module": ("settings_of_a_user.lr", lambda self: MODULE.lr, _set(MODULE, "lr", 0.2)),
    "class": ("Config.lr", lambda self: Config.lr, _set(Config, "lr", 0.2)),
    "object": ("CONFIGURED.decay", lambda self: CONFIGURED.decay, _set(CONFIGURED, "decay", 0.2)),
    "hidden by an object": ("CONFIGURED.lr", lambda self: CONFIGURED.lr, _set(CONFIGURED, "lr", 0.2)),
    "classmethod": ("global variable RATES", lambda self: Config.rate(), HALF),
    "helper": ("global variable RATES", lambda self: _helper(), HALF),
    "another helper": ("global variable _helper", lambda self: _helper(), _set(HERE, "_helper", _memoized)),
    "decorated": ("global variable RATES", lambda self: _decorated_helper(), HALF),
    "inner": ("global variable RATES", lambda self: [RATES[k] for k in "x"], HALF),
    "default": ("default argument of _with_data", lambda self: _with_data(), HALF),
    "other default": (
        "default argument of _with_number",
        lambda self: _with_number(),
        _set(_with_number, "__kwdefaults__", {"other": 0.2}),
    ),
    "list in a closure": (
        "value of an enclosing function",
        lambda self: _over_list(),
        lambda: _over_list.__closure__[0].cell_contents.append(1),  # type: ignore[index]
    ),
    "function in a closure": ("global variable RATES", lambda self: _over_function(), HALF),
    "number in a closure": (
        "by of an enclosing function",
        lambda self: _late(),
        _set(_late.__closure__[0], "cell_contents", 3.0),  # type: ignore[index]
    ),
    "class attribute": ("class attribute Base.factor", lambda self: self.__class__.factor, _set(Base, "factor", 0.2)),
    "list of the class": ("class attribute Base.rates", lambda self: self.rates, lambda: Base.rates.append(0.2)),
    "asked for in vain": (
        "class attribute Base.unheard_of",
        lambda self: getattr(self, "unheard_of", 0.1),
        _set(Base, "unheard_of", 0.2),
    ),
    "hidden by an heir": ("class attribute Mine.factor", lambda self: self.factor, lambda: None),
    "property": ("global variable RATES", lambda self: self.rate, HALF),
    "method": ("global variable RATES", lambda self: self.from_global(), HALF),
    "call of an object": ("global variable RATES", lambda self: Scaling()(), HALF),
    "making of an object": ("global variable RATES", lambda self: Configured().made, HALF),
    "making of an heir": ("global variable RATES", lambda self: FromConfigured().made, HALF),
    "method of an enum": ("global variable RATES", lambda self: OfKind.PLAIN.scale(), HALF),
    "getattr": ("class attribute Base.factor", lambda self: getattr(self, "factor", 1.0), _set(Base, "factor", 0.2)),
    "getattr of a name in a list": (
        "class attribute Base.factor",
        lambda self: [getattr(self, name) for name in NAMES],
        _set(Base, "factor", 0.2),
    ),
    "module in a local": ("settings_of_a_user.lr", lambda self: _through_a_local(), _set(MODULE, "lr", 0.2)),
    "module in a closure": ("settings_of_a_user.lr", lambda self: _over_module().lr, _set(MODULE, "lr", 0.2)),
    "singledispatch": ("global variable RATES", lambda self: _rule(INTEGER), HALF),
    "attribute of a function": (
        "attribute _with_attribute.made",
        lambda self: _with_attribute.made,
        _set(_with_attribute, "made", 0.2),
    ),
}
UNKNOWN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "tensor": ("global variable WEIGHT", lambda self: WEIGHT),
    "object": ("global variable OBJECT", lambda self: OBJECT.lr),
    "partial": ("global variable PARTIAL_OF_DATA", lambda self: PARTIAL_OF_DATA(1)),
    "table of data": ("global variable TABLE_OF_DATA", lambda self: TABLE_OF_DATA["rate"]("lr")),
    "bound": ("global variable BOUND", lambda self: BOUND("lr")),
    "item": ("global variable ITEM", lambda self: ITEM("lr")),
    "slot": ("global variable LENGTH", lambda self: LENGTH()),
    "cached": ("global variable WEIGHT", lambda self: _cached()),
    "empty cell": ("later of an enclosing function", lambda self: _before()),
    "long list": ("global variable LONG", lambda self: LONG[0]),
    "environ": ("attribute os.environ", lambda self: os.environ["RATE"]),
    "getenv": ("global variable environ", lambda self: os.getenv("RATE")),
    "import": ("module settings_of_a_user", lambda self: _importing()),
    "open": ("files (the global variable open)", lambda self: open("rate")),  # noqa: SIM115
    "path": ("files (the global variable Path)", lambda self: Path("rate").read_text()),
    "exists": ("files (the attribute os.path)", lambda self: os.path.exists("slow")),
    "stat": ("files (the attribute os.stat)", lambda self: os.stat("slow")),
    "import of files": ("module pathlib", lambda self: _importing_files()),
    "load": ("files (load)", lambda self: torch.load("rate")),
    "world size": ("a state of a process group (get_world_size)", lambda self: dist.get_world_size()),
    "imported rank": ("a state of a process group (get_rank)", lambda self: get_rank()),
    "seed": ("a state of a random number generator (initial_seed)", lambda self: torch.initial_seed()),
}


def _optimizer(read: Callable[[Any], Any], base: type = Base) -> Optimizer:
    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        return read(self)

    return type("Mine", (base,), {"step": step})()


def _unknown(optimizer: Optimizer) -> str | None:
    return outside(optimizer).unknown


def _changes(optimizer: Optimizer, change: Change) -> str | None:
    values = outside(optimizer).values
    assert values.changed() is None
    change()
    return values.changed()


@pytest.fixture
def as_before() -> Iterator[None]:
    """Undo what a test changes."""
    holders = [HERE, RATES, _hidden, vars(CONFIGURED)]
    copies = [dict(holder) for holder in holders]
    scale = TABLE[torch.ops.aten.add]["scale"]
    attributes = [(MODULE, "lr"), (Config, "lr"), (Base, "factor"), (_with_attribute, "made")]
    before = [getattr(*each) for each in attributes]
    yield
    for holder, copied in zip(holders, copies, strict=True):
        holder.clear()
        holder.update(copied)
    for (holder, name), value in zip(attributes, before, strict=True):
        setattr(holder, name, value)
    Base.rates[:] = [0.1]
    if hasattr(Base, "unheard_of"):
        del Base.unheard_of
    TABLE[torch.ops.aten.add]["scale"] = scale
    _with_number.__kwdefaults__ = {"other": 0.1}
    _over_list.__closure__[0].cell_contents[:] = [0.1]  # type: ignore[index]
    _late.__closure__[0].cell_contents = 2.0  # type: ignore[index]


@pytest.mark.parametrize("name", HARMLESS)
def test_what_stays_as_it_is_does_not_count(name: str) -> None:
    assert _unknown(_optimizer(HARMLESS[name])) is None


def test_what_a_framework_puts_into_the_class_of_loggers_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "advise", lambda self: WEIGHT, raising=False)
    assert _unknown(_optimizer(HARMLESS["logger"])) is None


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_change_of_what_can_be_followed_is_named(name: str, as_before: None) -> None:
    expected, read, change = FOLLOWED[name]
    optimizer = _optimizer(read)
    assert _unknown(optimizer) is None
    if name == "hidden by an heir":
        change = _set(type(optimizer), "factor", 0.1)
    assert expected in (_changes(optimizer, change) or "")


@pytest.mark.parametrize("name", FOLLOWED)
def test_code_finds_what_was_there_then(name: str, as_before: None) -> None:
    _, read, change = FOLLOWED[name]
    values = outside(_optimizer(read)).values
    change()
    with values.shown() as written:
        assert values.changed() is None
    assert not written and (values.changed() is not None or name == "hidden by an heir")


def test_code_that_changes_something_is_told_of(as_before: None) -> None:
    def counts(self: Any) -> None:
        rebind()
        RATES["steps"] = RATES.get("steps", 0) + 1

    values = outside(_optimizer(counts)).values
    before = rebound
    with values.shown(copies=True) as written:
        counts(None)
    assert sorted(written) == ["the global variable RATES", "the global variable rebound"]
    assert rebound == before and "steps" not in RATES and values.changed() is None


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_followed_is_named(name: str) -> None:
    expected, read = UNKNOWN[name]
    assert expected in (_unknown(_optimizer(read)) or "")


def test_what_the_optimizer_has_itself_hides_what_its_class_has() -> None:
    assert _unknown(_optimizer(lambda self: self.own, FromBase)) is None


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_optimizers_of_torch_read_nothing_from_elsewhere(kind: type) -> None:
    assert _unknown(kind([torch.zeros(1)], lr=0.1)) is None
    assert _unknown(type("Mine", (kind,), {})([torch.zeros(1)], lr=0.1)) is None


def _from_global(self: Any, closure: Any = None) -> Any:
    return WEIGHT


def _without_a_name() -> type:
    variables: dict[str, Any] = {"Base": SGD, "WEIGHT": WEIGHT}
    exec("class Mine(Base):\n    def step(self, closure=None):\n        return WEIGHT", variables)
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
    assert _unknown(kind([torch.zeros(1)], lr=0.1)) == "the global variable WEIGHT"


@pytest.mark.parametrize("name", ["step", "_init_group"])
def test_functions_put_in_classes_of_torch_are_searched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SGD, name, torch.no_grad()(_from_global))
    assert _unknown(SGD([torch.zeros(1)], lr=0.1)) == "the global variable WEIGHT"


def test_what_python_calls_without_naming_it_is_searched() -> None:
    def ask(self: Any, name: str) -> Any:
        return WEIGHT

    assert _unknown(type("Mine", (SGD,), {"__getattr__": ask})([torch.zeros(1)])) is not None


def test_a_metaclass_may_read_what_changes(as_before: None) -> None:
    kind = Meta("Mine", (FromBase,), {"step": lambda self, closure=None: type(self).of_class})
    assert _changes(kind(), HALF) == "the global variable RATES"


def test_what_the_optimizer_has_itself_does_not_hide_what_others_have(as_before: None) -> None:
    optimizer = _optimizer(lambda self: Config.lr)
    optimizer.lr = 0.1
    assert _changes(optimizer, _set(Config, "lr", 0.2)) == "the class attribute Config.lr"


def test_chains_of_calls_may_be_long() -> None:
    chain: dict[str, Any] = {"__name__": "chain_of_a_user", "weight": WEIGHT}
    exec("def last(self):\n    return weight\nstep0 = last", chain)
    exec("".join(f"def step{i}(self):\n    return step{i - 1}(self)\n" for i in range(1, 2000)), chain)
    assert _unknown(_optimizer(chain["step1999"])) == "the global variable weight"


def _module(name: str, *lines: str) -> dict[str, Any]:
    variables: dict[str, Any] = {"__name__": name, "_rates": {"lr": 0.1}, "changes": _changes, "found": ""}
    variables |= {"optimizer": _optimizer, "change": lambda: variables["_rates"].update(lr=0.2)}
    exec("\n".join(("def rate(self):\n    return _rates['lr']", *lines)), variables)
    return variables


def test_private_variables_of_the_main_script_may_change() -> None:
    script = _module("__main__")
    assert _changes(_optimizer(script["rate"]), script["change"]) == "the global variable _rates"


def test_private_variables_of_a_module_may_change_while_its_lines_run() -> None:
    variables = _module("module_of_a_user", "found = changes(optimizer(rate), change)")
    assert variables["found"] == "the global variable _rates"
    assert _changes(_optimizer(variables["rate"]), variables["change"]) is None


def test_private_variables_of_a_module_may_change_by_globals() -> None:
    variables = _module("module_of_a_user", "def halve():\n    globals()['_rates']['lr'] *= 0.5")
    assert _changes(_optimizer(variables["rate"]), variables["change"]) == "the global variable _rates"


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
