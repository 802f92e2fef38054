"""`state.after_update(fn)`: called once for each parameter and step, deferred or not.

That it gets new values, and that those it writes stay, the fuzzer draws (`after_update`, which clamps).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradient_loops as loops
from equivalence import SGD, Case, Run, check_case, optimizer, snapshot, train_step
from models import DeepNet, OddNet
from optimizers import interleaved_optimizers

FALLBACKS = {"pipelined": {}, "allreduce": {"schedule": "allreduce"}}


def clamp(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.clamp_(-0.05, 0.05)


class SeenFunctions(TorchFunctionMode):
    """Every call of torch goes through Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SeenOperators(TorchDispatchMode):
    """Every operator does, and those of an update would be one too many."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "clamp" not in str(func)
        return func(*args, **(kwargs or {}))


def clamp_beside_operators(run: Run) -> Iterator[Any]:
    """Forwards, which apply the updates, run inside of a mode; each clamp uses parameters that are being updated."""
    run.attach()
    if run.state is not None:
        run.state.after_update(clamp)
    for x, y in run.batches():
        run.optimizer.zero_grad()
        with SeenOperators():
            loss = run.loss(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        if run.state is None:
            with torch.no_grad():
                clamp(list(run.model.parameters()))
        yield loss


@pytest.mark.quick
def test_weights_are_constrained_beside_a_mode_that_sees_operators(on_ranks) -> None:
    check_case(Case(clamp_beside_operators, model=DeepNet, optimizer=SGD), on_ranks)


def see_default_device(sets: bool) -> str:
    run = Run(Case(model=DeepNet, optimizer=SGD), with_dear=True)
    run.attach()
    batches = list(run.batches())
    seen: Counter[str] = Counter()
    run.state.after_update(lambda _: seen.update([torch.get_default_device().type]))
    torch.set_default_device("meta" if sets else None)
    try:
        for x, y in batches:
            run.optimizer.zero_grad()
            with SeenFunctions() if sets else torch.device("meta"):
                loss = run.loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
        run.state.synchronize()
    finally:
        torch.set_default_device(None)
    assert run.state.stats().deferred_steps > 6
    run.detach()
    [only] = seen
    return only


@pytest.mark.parametrize(("sets", "device"), [(False, "cpu"), (True, "meta")], ids=["context", "set_default_device"])
def test_updates_know_the_default_device_of_step(on_ranks, sets, device) -> None:
    """Not that of a context in which a forward has applied them."""
    assert on_ranks(see_default_device, 1, sets) == [device]


class PartlyUsedNet(OddNet):
    """Has a frozen parameter, and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))


def count_calls(case: Case, reads: str) -> None:
    """Every parameter of every optimizer, once a step, whatever the script does in between."""
    run = Run(case, with_dear=True)
    run.attach()
    seen: Counter[int] = Counter()
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}

    def note(parameters: list[torch.Tensor]) -> None:
        assert not torch.is_grad_enabled()
        assert len(parameters) == len(set(map(id, parameters)))
        seen.update(map(id, parameters))

    handle = run.state.after_update(note)
    steps = 0
    for index, (x, y) in enumerate(run.batches()):
        for each in run.optimizers:
            each.zero_grad()
        run.loss(run.model(x), y).backward()
        if reads == "a gradient" and index % 3:
            next(run.model.parameters()).grad.norm()
        for each in run.optimizers:
            each.step()
        steps += 1
        if reads == "a parameter" and index % 3:
            next(run.model.parameters()).sum()
        if reads == "everything" or index % 4 == 3:
            run.state.synchronize()
            assert {names[key]: times for key, times in seen.items()} == dict.fromkeys(names.values(), steps)
    run.state.synchronize()
    handle.remove()
    run.optimizers[0].step()
    run.state.synchronize()
    assert max(seen.values()) == steps
    if reads == "nothing" and not case.dear:
        assert run.state.stats().deferred_steps > steps
    run.detach()


@pytest.mark.parametrize("dear", FALLBACKS.values(), ids=FALLBACKS)
@pytest.mark.parametrize("reads", ["nothing", "a parameter", "a gradient", "everything"])
def test_each_parameter_is_seen_once_a_step(on_ranks, reads, dear) -> None:
    case = Case(
        model=PartlyUsedNet, optimizer=interleaved_optimizers, dear=dear, steps=16, ddp={"find_unused_parameters": True}
    )
    on_ranks(count_calls, 2, case, reads)


def skip_some(case: Case) -> None:
    run = Run(case, with_dear=True)
    run.attach()
    seen: Counter[int] = Counter()
    run.state.after_update(lambda parameters: seen.update(map(id, parameters)))
    expected = 0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for index, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        loss = loops.inject_inf(run, index, run.loss(run.model(x), y))
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(run.optimizer)
        scaler.update()
        expected += scaler.get_scale() >= before
    run.state.synchronize()
    assert expected == case.steps - 2
    assert set(seen.values()) == {expected}
    run.detach()


@pytest.mark.parametrize("norms", ["exact", "sharded"])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_cause_no_call(on_ranks, fused, norms) -> None:
    factory = optimizer(torch.optim.SGD, lr=0.1, fused=fused)
    on_ranks(skip_some, 2, Case(optimizer=factory, steps=20, dear={"norms": norms}))


def raise_in_the_middle() -> str:
    run = Run(Case(model=DeepNet, steps=12), with_dear=True)
    run.attach()
    calls: list[int] = []

    def fail(parameters: list[torch.Tensor]) -> None:
        calls.append(len(parameters))
        if run.state.stats().deferred_steps > 3:
            raise ValueError("this average is full")

    run.state.after_update(fail)
    with pytest.raises(ValueError, match="this average is full") as caught:
        for x, y in run.batches():
            train_step(run, x, y)
    assert any("state.after_update()" in note for note in caught.value.__notes__)
    with pytest.raises(RuntimeError, match="this average is full"):
        run.model(run.batch(0)[0])
    before = snapshot(run.model.state_dict())  # can still be read
    assert all(bool(value.isfinite().all()) for value in before.values())
    run.detach()
    return "raised"


def test_an_error_comes_out_of_the_code_that_caused_the_update(on_ranks) -> None:
    assert on_ranks(raise_in_the_middle, 2) == ["raised", "raised"]


def go_on_after_detach() -> None:
    run = Run(Case(steps=8), with_dear=True)
    run.attach()
    seen: Counter[int] = Counter()
    handle = run.state.after_update(lambda parameters: seen.update(map(id, parameters)))
    for x, y in run.batches():
        train_step(run, x, y)
    run.state.detach()
    for index in range(3):
        train_step(run, *run.batch(index))
    assert set(seen.values()) == {11}
    handle.remove()
    train_step(run, *run.batch(0))
    assert set(seen.values()) == {11}


def test_it_goes_on_after_detach(on_ranks) -> None:
    on_ranks(go_on_after_detach, 2)


def come_before_hooks_of_the_script(schedule: str) -> None:
    run = Run(Case(steps=6, dear={"schedule": schedule}), with_dear=True)
    largest: list[float] = []

    def look(*_: Any) -> None:
        trained = [p for group in run.optimizer.param_groups for p in group["params"] if p.numel()]
        largest.append(max(float(p.detach().abs().max()) for p in trained))

    run.optimizer.register_step_post_hook(look)
    run.attach()
    run.state.after_update(clamp)
    for x, y in run.batches():
        train_step(run, x, y)
    run.state.detach()
    train_step(run, *run.batch(0))
    assert len(largest) == 7 and max(largest) < 0.0501


@pytest.mark.parametrize("schedule", ["dear", "allreduce"])
def test_they_come_before_hooks_of_the_script_and_stay_there_after_detach(on_ranks, schedule) -> None:
    on_ranks(come_before_hooks_of_the_script, 1, schedule)


def register_after_detach(is_off: bool) -> None:
    with mock.patch.dict(os.environ, {"DDP_CROSSOVER": "off"} if is_off else {}):
        run = Run(Case(steps=4), with_dear=True)
        run.attach()
    run.state.detach()
    seen: Counter[int] = Counter()
    for _ in range(2):
        run.state.after_update(lambda parameters: seen.update(map(id, parameters)))
    for x, y in run.batches():
        train_step(run, x, y)
    assert set(seen.values()) == {2 * run.case.steps}


@pytest.mark.parametrize("is_off", [False, True], ids=["detached", "switched_off"])
def test_functions_given_to_a_detached_state_are_called(on_ranks, is_off) -> None:
    on_ranks(register_after_detach, 1, is_off)


def remove_inside() -> None:
    run = Run(Case(steps=10), with_dear=True)
    run.attach()
    calls: list[int] = []
    run.state.after_update(lambda _: later.remove())
    later = run.state.after_update(lambda parameters: calls.append(len(parameters)))
    for x, y in run.batches():
        train_step(run, x, y)
    run.detach()
    assert calls == []


def test_a_function_may_remove_another(on_ranks) -> None:
    on_ranks(remove_inside, 1)
