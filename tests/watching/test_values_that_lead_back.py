"""Objects that lead back to themselves, or are nested deeper than calls can be, wherever an optimizer has them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from changed_after_step import train_both_ways
from ddp_crossover.moments import call_before_backward
from ddp_crossover.torch_internals.dispatch import tensors_in_output
from ddp_crossover.watching.at_sight import why_no_copy
from ddp_crossover.watching.known_optimizers import KnownOptimizers
from ddp_crossover.watching.separability import judge
from ddp_crossover.watching.values import copied, same, tensors_in
from own_optimizers import OwnOptimizer

DEPTH = 2000


class Node:
    def __init__(self, **others: Any) -> None:
        self.scale = 0.5
        vars(self).update(others)


def _itself() -> Any:
    node = Node()
    node.itself = node  # type: ignore[attr-defined]
    return node


def _each_other() -> Any:
    one, two = Node(), Node()
    one.other, two.other = two, one  # type: ignore[attr-defined]
    return one


def _linked_both_ways() -> Any:
    nodes = [Node() for _ in range(20)]
    for before, after in itertools.pairwise(nodes):
        before.after, after.before = after, before  # type: ignore[attr-defined]
    return nodes[10]


def _parent_of_children() -> Any:
    parent = Node()
    parent.children = [Node(parent=parent) for _ in range(3)]  # type: ignore[attr-defined]
    return parent


def _list_in_itself() -> Any:
    made: list[Any] = [0.5]
    made.append(made)
    return made


def _dict_in_itself() -> Any:
    made: dict[str, Any] = {"scale": 0.5}
    made["itself"] = made
    return made


def _tuple_in_itself() -> Any:
    inner: list[Any] = [0.5]
    inner.append((inner, 0.5))
    return inner[1]


def _chain_of_objects() -> Any:
    node = Node()
    for _ in range(DEPTH):
        node = Node(after=node)
    return node


def _chain_of_lists() -> Any:
    made: Any = 0.5
    for _ in range(DEPTH):
        made = [made]
    return made


def _chain_of_tuples() -> Any:
    made: Any = 0.5
    for _ in range(DEPTH):
        made = (made,)
    return made


def _doubled() -> Any:
    made: list[Any] = [0.5]
    for _ in range(40):
        made = [made, made]
    return made


VALUES = {
    make.__name__.strip("_"): make
    for make in (
        *(_itself, _each_other, _linked_both_ways, _parent_of_children, _list_in_itself, _dict_in_itself),
        *(_tuple_in_itself, _chain_of_objects, _chain_of_lists, _chain_of_tuples, _doubled),
    )
}


def _scale(value: Any) -> float:
    """What a step reads of it."""
    return float(getattr(value, "scale", 0.25))


class InAttribute(OwnOptimizer):
    def __init__(self, params: Any, value: Callable[[], Any]) -> None:
        super().__init__(params)
        self.value = value()

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * _scale(self.value))


class InGroup(OwnOptimizer):
    def __init__(self, params: Any, value: Callable[[], Any]) -> None:
        super().__init__(params, value=value())

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * _scale(group["value"]))


class InSharedState(OwnOptimizer):
    def __init__(self, params: Any, value: Callable[[], Any]) -> None:
        super().__init__(params)
        self.state["shared"]["value"] = value()

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * _scale(self.state["shared"]["value"]))


class InState(OwnOptimizer):
    def __init__(self, params: Any, value: Callable[[], Any]) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["value"] = value()

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * _scale(self.state[p].get("value")))


class OnParameters(OwnOptimizer):
    def __init__(self, params: Any, value: Callable[[], Any]) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for p in group["params"]:
                p.value = value()

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * _scale(getattr(p, "value", None)))


VALUE: Any = None


class InGlobal(OwnOptimizer):
    def __init__(self, params: Any, value: Callable[[], Any]) -> None:
        global VALUE
        VALUE = value()
        super().__init__(params)

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * _scale(VALUE))


def _in_cell(params: Any, value: Callable[[], Any]) -> Any:
    content = value()

    class InCell(OwnOptimizer):
        def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
            for p in parameters:
                p.add_(p.grad, alpha=-group["lr"] * _scale(content))

    return InCell(params)


def _as_default(params: Any, value: Callable[[], Any]) -> Any:
    content = value()

    class AsDefault(OwnOptimizer):
        def update(self, group: dict[str, Any], parameters: list[Any], value: Any = content) -> None:
            for p in parameters:
                p.add_(p.grad, alpha=-group["lr"] * _scale(value))

    return AsDefault(params)


def _in_class(params: Any, value: Callable[[], Any]) -> Any:
    class InClass(OwnOptimizer):
        value: Any = None

        def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
            for p in parameters:
                p.add_(p.grad, alpha=-group["lr"] * _scale(self.value))

    InClass.value = value()
    return InClass(params)


PLACES: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "attribute": InAttribute,
    "param_group": InGroup,
    "shared_state": InSharedState,
    "state_of_each": InState,
    "attribute_of_parameters": OnParameters,
    "global": InGlobal,
    "cell": _in_cell,
    "default_argument": _as_default,
    "class_attribute": _in_class,
}


# Where updates begin with a copy.
_COPIED = ("attribute", "param_group", "shared_state", "attribute_of_parameters")


def _begin(parameters: list[Any], place: str, value: str) -> tuple[Any, Callable[[float], object]]:
    held: list[Any] = []

    def make() -> Any:
        held.append(VALUES[value]())
        return held[-1]

    def change(scale: float) -> None:
        for each in held:
            if isinstance(each, Node):
                each.scale = scale

    return PLACES[place](parameters, make), change


def _compare(place: str) -> None:
    for value in VALUES:
        stats = train_both_ways(functools.partial(_begin, place=place, value=value), value)
        is_followed = place == "state_of_each" or (value == "chain_of_tuples" and place not in _COPIED)
        assert is_followed or any("waits for all gradients" in reason for reason in stats.fallbacks), (place, value)


@pytest.mark.parametrize("place", PLACES)
def test_training_has_the_bits_of_plain_ddp(on_ranks, place: str) -> None:
    on_ranks(_compare, 2, place)


def _parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]


@pytest.mark.quick
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", ["attribute", "param_group"])
def test_a_setting_that_becomes_one_waits_from_then_on(place: str, value: str) -> None:
    optimizer: Any = PLACES[place](_parameters(), lambda: 0.5)
    known = KnownOptimizers([optimizer], lambda _: "p")
    assert known.why_not(optimizer) is None
    if place == "attribute":
        optimizer.value = VALUES[value]()
    else:
        optimizer.param_groups[0]["value"] = VALUES[value]()
    known.look_again(optimizer)
    assert "value" in str(known.why_not(optimizer))
    known.look_again(optimizer)
    optimizer.param_groups[0]["value"] = optimizer.value = 0.5
    known.look_again(optimizer)
    assert known.why_not(optimizer) is None


def _with_partial(*values: Any) -> Any:
    rule = functools.partial(max, *values)
    rule.keywords["key"] = rule

    class OfPartial(OwnOptimizer):
        def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
            return super().update(group, parameters) if rule.keywords else None

    return OfPartial(_parameters())


@pytest.mark.quick
def test_a_partial_function_may_have_itself_as_an_argument() -> None:
    assert judge(_with_partial(1.0)).why_not is None
    assert "rule of an enclosing function" in str(judge(_with_partial([1.0])).why_not)


@pytest.mark.quick
@pytest.mark.parametrize("value", VALUES)
def test_what_steps_make_of_a_setting_they_change_waits(value: str) -> None:
    optimizer: Any = InAttribute(_parameters(), lambda: 0.5)
    assert why_no_copy(optimizer, frozenset((".value",))) is None
    optimizer.value = VALUES[value]()
    assert "its attribute .value" in str(why_no_copy(optimizer, frozenset((".value",))))
    optimizer.value = None
    optimizer.param_groups[0]["params"][0].value = VALUES[value]()
    assert "of a parameter" in str(why_no_copy(optimizer, frozenset()))


@pytest.mark.quick
@pytest.mark.parametrize("value", VALUES)
def test_values_are_compared_and_left_alone(value: str) -> None:
    made = VALUES[value]()
    assert same(made, VALUES[value]()) and not same(made, [VALUES[value]()])
    assert copied(made) is made
    assert list(tensors_in([made, torch.ones(1)])) == [torch.ones(1)]


@dataclass
class Output:
    result: Any
    others: Any = None


@pytest.mark.quick
@pytest.mark.parametrize("value", VALUES)
def test_outputs_of_models_may_hold_them(value: str) -> None:
    result, calls = torch.ones(2, requires_grad=True) * 2, []
    output = Output([VALUES[value](), {"result": result}])
    output.others = output
    assert tensors_in_output([VALUES[value](), {"result": result}]) == [result]
    assert call_before_backward(output, lambda: calls.append(None))
    result.sum().backward()
    assert len(calls) == 1
