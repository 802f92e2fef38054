"""`state.after_update(fn)`: called once for each parameter and step, with new values, deferred or not."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradient_loops as loops
from equivalence import SGD, Case, Run, check_case, optimizer, run_arm, snapshot, train_step
from models import OUTPUTS, DeepNet, OddNet

FALLBACKS = {"pipelined": {}, "allreduce": {"schedule": "allreduce"}}


def clamp(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.clamp_(-0.05, 0.05)


def clamp_weights(run: Run) -> Iterator[Any]:
    """After `step()` in plain DDP, in `after_update` with DeAR."""
    run.attach()
    if run.state is not None:
        run.state.after_update(clamp)
    for x, y in run.batches():
        loss = train_step(run, x, y)
        if run.state is None:
            with torch.no_grad():
                clamp(list(run.model.parameters()))
        yield loss


def clamp_clipped(run: Run) -> Iterator[Any]:
    """Nothing is deferred in these steps."""
    run.attach()
    if run.state is not None:
        run.state.after_update(clamp)
    for loss in loops._backward(run):
        clip_grad_norm_(run.model.parameters(), loops.ACTIVE_NORM)
        run.optimizer.step()
        if run.state is None:
            with torch.no_grad():
                clamp(list(run.model.parameters()))
        yield loss


@pytest.mark.quick
@pytest.mark.parametrize("dear", FALLBACKS.values(), ids=FALLBACKS)
def test_weights_are_constrained_right_after_their_update(on_ranks, dear) -> None:
    check_case(Case(clamp_weights, model=DeepNet, optimizer=SGD, dear=dear, pipelined=not dear), on_ranks)


@pytest.mark.parametrize("world_size", [1, 3])
def test_weights_are_constrained_on_other_numbers_of_ranks(on_ranks, world_size) -> None:
    check_case(Case(clamp_weights, model=DeepNet, world_size=world_size, strict=False), on_ranks)


def test_weights_are_constrained_in_steps_that_are_not_deferred(on_ranks) -> None:
    check_case(Case(clamp_clipped, optimizer=SGD, pipelined=False), on_ranks)


class SeenFunctions(TorchFunctionMode):
    """Every call of torch goes through Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SeenOperators(TorchDispatchMode):
    """Every operator does, and those of an update would be one too many."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "clamp" not in str(func)
        return func(*args, **(kwargs or {}))


class DefaultDevice(AbstractContextManager[None]):
    """What `torch.set_default_device` leaves active for good."""

    def __enter__(self) -> None:
        torch.set_default_device("cpu")

    def __exit__(self, *_: object) -> None:
        torch.set_default_device(None)


def clamp_beside(run: Run, mode: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
    """Forwards, which apply the updates, run inside of a mode; each clamp uses parameters that are being updated."""
    run.attach()
    if run.state is not None:
        run.state.after_update(clamp)
    for x, y in run.batches():
        run.optimizer.zero_grad()
        with mode():
            loss = run.loss(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        if run.state is None:
            with torch.no_grad():
                clamp(list(run.model.parameters()))
        yield loss


MODES = [SeenFunctions, SeenOperators, DefaultDevice, partial(torch.device, "cpu")]


@pytest.mark.parametrize("mode", MODES, ids=["function", "dispatch", "default_device", "device"])
def test_weights_are_constrained_beside_modes(on_ranks, mode) -> None:
    check_case(Case(partial(clamp_beside, mode=mode), model=DeepNet, optimizer=SGD), on_ranks)


def see_default_device(sets: bool) -> str:
    run = Run(Case(model=DeepNet, optimizer=optimizer(torch.optim.Adam, lr=1e-3)), with_dear=True)
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


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [torch.optim.AdamW(parameters[::2], lr=0.01), torch.optim.SGD(parameters[1::2], lr=0.1)]


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
        model=PartlyUsedNet, optimizer=two_optimizers, dear=dear, steps=16, ddp={"find_unused_parameters": True}
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
    factory = partial(_sgd, fused=fused)
    on_ranks(skip_some, 2, Case(optimizer=factory, steps=20, dear={"norms": norms}))


def _sgd(model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)


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


def share_an_optimizer() -> None:
    """Each of two models has its own state; the optimizer has a parameter of neither, too."""
    import ddp_crossover as dx

    run = Run(Case(model=DeepNet), with_dear=True)
    first, second = run.model, DistributedDataParallel(DeepNet())
    alone = nn.Parameter(torch.ones(OUTPUTS))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters(), alone], lr=0.1)
    seen: list[Counter[int]] = []
    states = []
    for model in (first, second):
        states.append(dx.attach(model, optimizer, fusion_mb=1e-4))
        seen.append(Counter())
        states[-1].after_update(lambda parameters, counts=seen[-1]: counts.update(map(id, parameters)))
    for index in range(12):
        x, y = run.batch(index)
        optimizer.zero_grad()
        run.loss(first(x) + second(x) * alone, y).backward()
        optimizer.step()
    for state, model, counts in zip(states, (first, second), seen, strict=True):
        state.synchronize()
        assert state.stats().deferred_steps > 6
        assert counts == {id(parameter): 12 for parameter in [*model.parameters(), alone]}
    for state in states:
        state.detach()


def test_a_model_that_shares_its_optimizer_is_followed_by_its_own_state_only(on_ranks) -> None:
    on_ranks(share_an_optimizer, 1)


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


def test_it_costs_no_overlap(on_ranks) -> None:
    for deferred, looks in on_ranks(_figures, 2, Case(clamp_weights, model=DeepNet, optimizer=SGD)):
        assert deferred > 8
        assert looks <= 1  # this test, at the end


def _figures(case: Case) -> tuple[int, int]:
    _, _, stats = run_arm(case, with_dear=True)
    return stats.deferred_steps, sum(stats.looks.values())
