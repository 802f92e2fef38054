"""What the updates of a step write to what belongs to no parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from ddp_crossover.watching.optimizer_snapshot import OptimizerSnapshot, StandIn, ToUpdate
from ddp_crossover.watching.update_writes import DifferentWrites
from own_optimizers import OwnOptimizer


class Writes(OwnOptimizer):
    """Hands each parameter to the test."""

    def __init__(self, count: int, write: Any) -> None:
        super().__init__([Parameter(torch.full((2,), float(index))) for index in range(count)], seen=0, tensor=None)
        self.write = write

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            self.write(self, group, p)


def _updates(optimizer: Writes, counters: frozenset[str] = frozenset(), state: Any = None) -> None:
    """Run one update for each parameter, the last one first."""
    snapshot = OptimizerSnapshot(optimizer, state, counters=counters)
    snapshot.leave_alone()
    for parameter in reversed(optimizer.param_groups[0]["params"]):
        _update(snapshot, parameter)


def _update(snapshot: OptimizerSnapshot, parameter: Any) -> None:
    memory = Parameter(parameter.detach())
    memory.grad = torch.ones(2)
    snapshot.step({0: [ToUpdate(parameter, memory)]})


def _count(optimizer: Any, group: dict[str, Any], p: Any) -> None:
    if p[0] != 1:
        group["seen"] += 1


def test_whole_numbers_add_up() -> None:
    optimizer = Writes(4, _count)
    _updates(optimizer)
    assert optimizer.param_groups[0]["seen"] == 3 and type(optimizer.param_groups[0]["seen"]) is int


def test_of_what_a_trial_has_seen_change_the_first_update_says_it_all() -> None:
    optimizer = Writes(4, lambda _, group, p: group.update(seen=group["seen"] + 1))
    _updates(optimizer, frozenset(("seen",)))
    assert optimizer.param_groups[0]["seen"] == 1


def test_what_all_set_to_the_same_counts_once() -> None:
    optimizer = Writes(3, lambda self, group, p: group.update(seen=7))
    _updates(optimizer)
    assert optimizer.param_groups[0]["seen"] == 7


def _raise_flag(optimizer: Any, group: dict[str, Any], p: Any) -> None:
    optimizer.flag = True


def test_a_flag_that_all_set_is_set() -> None:
    optimizer = Writes(3, _raise_flag)
    optimizer.flag = False
    _updates(optimizer)
    assert optimizer.flag is True


def test_an_update_that_only_reads_a_count_of_others_reads_what_it_was_at_step() -> None:
    read = []
    optimizer = Writes(3, lambda self, group, p: (read.append(group["seen"] * 2.0), _count(self, group, p)))
    _updates(optimizer)
    assert read == [0.0, 0.0, 0.0] and optimizer.param_groups[0]["seen"] == 2


def test_a_group_that_was_added_since_step_takes_nothing() -> None:
    optimizer = Writes(2, lambda self, group, p: setattr(self, "begun", True))
    snapshot = OptimizerSnapshot(optimizer, counters=frozenset())
    snapshot.leave_alone()
    optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})
    _update(snapshot, optimizer.param_groups[0]["params"][0])
    assert optimizer.begun and "begun" not in optimizer.param_groups[1]  # type: ignore[attr-defined]


def test_what_a_script_has_set_since_step_stays() -> None:
    optimizer = Writes(2, _count)
    snapshot = OptimizerSnapshot(optimizer, counters=frozenset())
    snapshot.leave_alone()
    optimizer.param_groups[0]["seen"] = 100
    parameter = optimizer.param_groups[0]["params"][0]
    snapshot.step({0: [ToUpdate(parameter, Parameter(parameter.detach()))]})
    assert optimizer.param_groups[0]["seen"] == 100


def test_what_the_step_has_set_itself_updates_do_not_set() -> None:
    optimizer = Writes(2, _count)
    snapshot, stand_in = OptimizerSnapshot(optimizer, counters=frozenset()), StandIn(optimizer, lambda _: False)
    stand_in.optimizer.param_groups[0]["seen"] = 10
    stand_in.give_back()
    snapshot.leave_alone()
    parameter = optimizer.param_groups[0]["params"][0]
    memory = Parameter(parameter.detach())
    memory.grad = torch.ones(2)
    snapshot.step({0: [ToUpdate(parameter, memory)]})
    assert optimizer.param_groups[0]["seen"] == 10


def _set_value(optimizer: Any, group: dict[str, Any], p: Any) -> None:
    optimizer.last = float(p[0])


def _add_fractions(optimizer: Any, group: dict[str, Any], p: Any) -> None:
    group["seen"] += 0.1


def _count_in_tensor(optimizer: Any, group: dict[str, Any], p: Any) -> None:
    group["tensor"] += 1


def _append(optimizer: Any, group: dict[str, Any], p: Any) -> None:
    group["tensor"].append(1)


def _turn_over(optimizer: Any, group: dict[str, Any], p: Any) -> None:
    optimizer.flag = not getattr(optimizer, "flag", False)


def _turn_over_number(optimizer: Any, group: dict[str, Any], p: Any) -> None:
    group["seen"] = 1 - group["seen"]


def _negate(optimizer: Any, group: dict[str, Any], p: Any) -> None:
    group["seen"] = -group["seen"]


def _delete(optimizer: Any, group: dict[str, Any], p: Any) -> None:
    optimizer.__dict__.pop("gone", None)


@pytest.mark.parametrize(
    ("write", "tensor", "what"),
    [
        (_turn_over, None, ".flag"),
        (_turn_over_number, None, "seen"),
        (_negate, None, "seen"),
        (_delete, None, ".gone"),
        (_set_value, None, ".last"),
        (_add_fractions, None, "seen"),
        (_count_in_tensor, torch.zeros(()), "tensor"),
        (_append, [], "tensor"),
    ],
)
def test_what_neither_adds_up_nor_is_the_same_is_an_error(write: Any, tensor: Any, what: str) -> None:
    optimizer = Writes(2, write)
    optimizer.param_groups[0]["tensor"] = tensor
    optimizer.gone = 1
    optimizer.param_groups[0]["seen"] = 3
    with pytest.raises(DifferentWrites, match=f"change '{what}'"):
        _updates(optimizer)


@pytest.mark.parametrize(("write", "what"), [(_count, "seen"), (_raise_flag, ".flag"), (_append, "tensor")])
def test_an_update_of_a_part_of_a_parameter_notes_nothing(write: Any, what: str) -> None:
    optimizer = Writes(2, write)
    optimizer.param_groups[0]["tensor"] = []
    with pytest.raises(DifferentWrites, match=f"change '{what}', .* and shards .* cannot note that"):
        _updates(optimizer, state={})
