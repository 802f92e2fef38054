"""`strict=True` tells of what goes past everything: memory written or read by address, and readers that no
override sees and that come late.
"""

from __future__ import annotations

import ctypes
import math
from functools import partial
from typing import Any

import pytest
import torch

from equivalence import Case, Run, is_finite, plain_loop, snapshot
from invisible_models import LateScriptNet
from models import DeepNet, OddNet
from torch_features import HAS_COVERS

LATE = 5  # long after the first forwards

pytestmark = pytest.mark.quick


class _Memory:
    """The memory of parameters by their names, as an extension in C++ holds it: addresses only."""

    def __init__(self, run: Run) -> None:
        self.address_of = {name: p.data_ptr() for name, p in run.model.module.named_parameters()}
        self.numel_of = {name: p.numel() for name, p in run.model.module.named_parameters()}

    def read(self, name: str) -> list[float]:
        return list(self._floats(name))

    def read_all(self) -> list[float]:
        return [number for name in self.address_of for number in self.read(name)]

    def write(self, name: str, index: int, value: float) -> None:
        self._floats(name)[index] = value

    def _floats(self, name: str) -> Any:
        return (ctypes.c_float * self.numel_of[name]).from_address(self.address_of[name])


def _train_until(run: Run, step: int) -> None:
    """Up to and with this step, whose update is pending then."""
    for index, _ in enumerate(plain_loop(run)):
        if index == step:
            return


def _error_of_forward_after_a_write(name: str, index: int, whole: bool) -> tuple[str, str]:
    run = Run(Case(model=DeepNet, strict=True), with_dear=True)
    memory = _Memory(run)
    _train_until(run, LATE)
    for each in range(memory.numel_of[name]) if whole else [index]:
        memory.write(name, each, 0.5)
    x, _ = run.batch(0)
    try:
        run.model(x)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    finally:
        run.detach()
    return "", "nothing was noticed"


@pytest.mark.parametrize("name, index, whole", [("0.weight", 3, False), ("6.bias", 0, False), ("14.weight", 0, True)])
def test_memory_written_by_address_is_an_error_that_names_the_parameter(on_ranks, name, index, whole) -> None:
    for kind, message in on_ranks(_error_of_forward_after_a_write, 2, name, index, whole):
        assert kind, message
        assert name in message


def _memory_before_and_after_a_read(strict: bool) -> tuple[list[float], list[float], list[float], list[float]]:
    """What all memory holds while updates are pending, the first parameter's value, its memory then, and all memory
    after `synchronize()`.
    """
    run = Run(Case(model=DeepNet, strict=strict), with_dear=True)
    memory = _Memory(run)
    first = run.model.module[0].weight
    _train_until(run, LATE)
    pending = memory.read_all()
    value = first.detach().flatten().tolist()
    updated = memory.read("0.weight")
    run.synchronize()
    synced = memory.read_all()
    run.detach()
    return pending, value, updated, synced


def test_memory_read_by_address_is_nan_until_somebody_asks_the_parameter(on_ranks) -> None:
    for pending, value, updated, synced in on_ranks(_memory_before_and_after_a_read, 2, True):
        assert all(map(math.isnan, pending))
        assert all(map(math.isfinite, value + synced))
        assert updated == value


def test_memory_holds_the_old_value_without_strict(on_ranks) -> None:
    [(pending, value, updated, synced)] = on_ranks(_memory_before_and_after_a_read, 1, False)
    assert all(map(math.isfinite, pending + synced))
    assert pending[: len(value)] != value
    assert updated == value


def _outcome_of_a_late_script(strict: bool) -> tuple[int, bool, str, str]:
    """At which step the run ended, whether after its forward, and how."""
    run = Run(Case(model=partial(LateScriptNet, LATE), strict=strict), with_dear=True)
    step, forward_ended = 0, False
    try:
        for step, (x, y) in enumerate(run.batches()):  # noqa: B007
            run.optimizer.zero_grad()
            forward_ended = False
            loss = run.loss(run.model(x), y)
            forward_ended = True
            loss.backward()
            run.optimizer.step()
    except RuntimeError as error:
        return step, forward_ended, type(error).__name__, str(error)
    finally:
        run.detach()
    return step, forward_ended, "", "nothing was noticed"


@pytest.mark.parametrize("strict", [False, True])
def test_a_script_that_comes_late_is_an_error_that_names_the_parameter(on_ranks, strict) -> None:
    for step, forward_ended, kind, message in on_ranks(_outcome_of_a_late_script, 2, strict):
        assert kind, message
        assert "bias" in message
        assert step == LATE
        assert forward_ended == (kind == "StaleParameterError")
        # What `strict` shows is NaN, which gets as far as backward; so does the old value where torch lacks covers.
        assert forward_ended == (strict or not HAS_COVERS)


def _share_of_steps_without_nan(make_model: Any) -> list[bool]:
    run = Run(Case(model=make_model, strict=True), with_dear=True)
    parameters = list(run.model.module.parameters())
    finite = []
    for loss in plain_loop(run):
        finite.append(is_finite([loss.detach(), snapshot(parameters)]))
    run.detach()
    return finite


@pytest.mark.parametrize("model", [DeepNet, OddNet])
def test_nobody_who_asks_torch_sees_a_nan(on_ranks, model) -> None:
    for finite in on_ranks(_share_of_steps_without_nan, 2, model):
        assert finite == [True] * Case().steps


def _value_kept_after_detach(strict: bool) -> tuple[list[float], list[float]]:
    run = Run(Case(model=DeepNet, strict=strict), with_dear=True)
    memory = _Memory(run)
    _train_until(run, LATE)
    run.detach()
    return memory.read("0.weight"), run.model.module[0].weight.detach().flatten().tolist()


def test_detach_leaves_updated_values_in_the_same_memory(on_ranks) -> None:
    for in_memory, value in on_ranks(_value_kept_after_detach, 2, True):
        assert in_memory == value
        assert bool(torch.tensor(value).isfinite().all())
