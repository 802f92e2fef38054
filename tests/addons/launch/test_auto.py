"""`dx.auto()`: finds models and optimizers by itself, on all ranks the same, or leaves them alone."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ddp_crossover as dx
from harness import run_ranks
from heard import heard
from models import INPUTS, DeepNet

OPTIONS = {"fusion_mb": 0.001}
STEPS = 10


def _batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        yield torch.randn(4, INPUTS, generator=generator)


def _network() -> DistributedDataParallel:
    return DistributedDataParallel(DeepNet())


def _train(ddp: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for x in _batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def _one(auto: Callable[[], Any]) -> Any:
    ddp, found = _network(), auto()
    _train(ddp, AdamW(ddp.parameters(), lr=0.01))
    return ddp, found


def _evaluated_before(auto: Callable[[], Any]) -> Any:
    found, ddp = auto(), _network()
    optimizer = AdamW(ddp.parameters(), lr=0.01)
    with torch.no_grad():
        ddp(torch.randn(2, INPUTS))
    ddp.eval()(torch.randn(2, INPUTS))
    ddp.train().requires_grad_(False)(torch.randn(2, INPUTS))
    assert found is None or not found.states
    _train(ddp.requires_grad_(True), optimizer)
    return ddp, found


def _only_the_module_goes_back_to_training(auto: Callable[[], Any]) -> Any:
    found, ddp = auto(), _network()
    optimizer = AdamW(ddp.parameters(), lr=0.01)
    with torch.no_grad():
        ddp.eval()(torch.randn(2, INPUTS))
    ddp.module.train()  # as Lightning after a validation
    _train(ddp, optimizer)
    assert not ddp.training
    return ddp, found


def _two_optimizers(auto: Callable[[], Any]) -> Any:
    found, ddp = auto(), _network()
    parameters = list(ddp.parameters())
    _train(ddp, SGD(parameters[:3], lr=0.1, momentum=0.9), AdamW(parameters[3:], lr=0.01))
    return ddp, found


def _two_models(auto: Callable[[], Any]) -> Any:
    found, first, second = auto(), _network(), _network()
    one, other = SGD(first.parameters(), lr=0.1), SGD(second.parameters(), lr=0.1)
    for x in _batches():
        loss = first(x).square().mean() + second(x).square().mean()
        one.zero_grad()
        other.zero_grad()
        loss.backward()
        one.step()
        other.step()
    return first, second, found


def _optimizer_comes_late(auto: Callable[[], Any]) -> Any:
    found, ddp = auto(), _network()
    ddp(torch.ones(2, INPUTS)).sum().backward()
    _train(ddp, AdamW(ddp.parameters(), lr=0.01))
    return ddp, found


def _a_copy_is_trained(auto: Callable[[], Any]) -> Any:
    found, ddp = auto(), _network()
    twin = copy.deepcopy(ddp)
    _train(twin, AdamW(twin.parameters(), lr=0.01))
    return twin, found


def _compiled(auto: Callable[[], Any]) -> Any:
    found, ddp = auto(), _network()
    _train(torch.compile(ddp, backend="eager"), AdamW(ddp.parameters(), lr=0.01))
    return ddp, found


def _copied_and_saved_on_the_way(auto: Callable[[], Any]) -> Any:
    found, ddp = auto(), _network()
    optimizer = AdamW(ddp.parameters(), lr=0.01)
    _train(ddp, optimizer)
    average = torch.optim.swa_utils.AveragedModel(ddp)
    saved = io.BytesIO()
    torch.save(ddp, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    _train(ddp, optimizer)
    average.update_parameters(ddp)
    _train(loaded, AdamW(loaded.parameters(), lr=0.01))
    return ddp, average.module, loaded, found


def _halves_take_turns(auto: Callable[[], Any]) -> Any:
    """Attached to in a forward in which one half is frozen."""
    found, ddp = auto(), DistributedDataParallel(DeepNet(), find_unused_parameters=True)
    layers = list(ddp.module)
    halves = [nn.ModuleList(layers[:6]), nn.ModuleList(layers[6:])]
    optimizers = [AdamW(half.parameters(), lr=0.01) for half in halves]
    for x in _batches():
        for trained, optimizer in zip(halves, optimizers, strict=True):
            for half in halves:
                half.requires_grad_(half is trained)
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
    return ddp, found


SCRIPTS = [
    _one,
    _evaluated_before,
    _only_the_module_goes_back_to_training,
    _two_optimizers,
    _two_models,
    _optimizer_comes_late,
    _a_copy_is_trained,
    _compiled,
    _copied_and_saved_on_the_way,
    _halves_take_turns,
]


def _outcome(script: Callable[[Callable[[], Any]], Any], with_auto: bool) -> tuple[list[bytes], list[int]]:
    torch.manual_seed(3)
    *models, found = script((lambda: dx.auto(**OPTIONS)) if with_auto else (lambda: None))
    values = [p.detach().numpy().tobytes() for model in models for p in model.parameters()]
    return values, [state.stats().pipelined_iterations for state in found.states] if found else []


def _outcomes(with_auto: bool) -> list[tuple[list[bytes], list[int]]]:
    return [_outcome(script, with_auto) for script in SCRIPTS]


def test_scripts_train_to_the_bits_of_plain_ddp_and_are_pipelined() -> None:
    # Fresh ranks, since a process stays watched.
    plain, ours = run_ranks(_outcomes, 2, False), run_ranks(_outcomes, 2, True)
    for rank in range(2):
        for script, (expected, _), (values, pipelined) in zip(SCRIPTS, plain[rank], ours[rank], strict=True):
            assert values == expected, script.__name__
            assert len(pipelined) == 1 + (script is _two_models) and min(pipelined) >= 4, script.__name__


def _called_from(step: int, attaches: bool) -> list[str]:
    """Train past DDP before that step; what is said of it."""
    with heard() as said:
        dx.auto(**OPTIONS)
        ddp = _network()
        optimizer = SGD(ddp.parameters(), lr=0.1)
        state = dx.attach(ddp, optimizer, **OPTIONS) if attaches else None
        for index in range(12):
            optimizer.zero_grad()
            model = ddp if index >= step else ddp.module
            model(torch.ones(2, INPUTS)).square().mean().backward()
            optimizer.step()
        if state is not None:
            state.detach()
    return [line for line in said if "nothing is attached to" in line]


def test_a_model_that_is_trained_and_never_called_is_named() -> None:
    [said], other = run_ranks(_called_from, 2, 12, False)
    assert "SGD.step() at test_auto.py:" in said
    assert "trains DeepNet, whose DistributedDataParallel has not been" in said
    assert not other


@pytest.mark.parametrize(("step", "attaches"), [(5, False), (12, True)], ids=["called late", "attached to"])
def test_one_that_is_called_or_attached_to_is_not(step, attaches) -> None:
    assert run_ranks(_called_from, 2, step, attaches) == [[], []]


def _never_called_beside_a_hook_of_others() -> int:
    dx.auto(**OPTIONS)
    steps: list[None] = []
    register_optimizer_step_post_hook(lambda *_: steps.append(None))
    ddp = _network()
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for _ in range(12):
        optimizer.step()
    return len(steps)


def test_saying_so_leaves_hooks_of_others_alone() -> None:
    assert run_ranks(_never_called_beside_a_hook_of_others, 2) == [12, 12]


def _attached_by_the_script(with_auto: bool) -> tuple[list[bytes], int]:
    torch.manual_seed(3)
    found, ddp = dx.auto(**OPTIONS) if with_auto else None, _network()
    optimizer = AdamW(ddp.parameters(), lr=0.01)
    state = dx.attach(ddp, optimizer, **OPTIONS)
    _train(ddp, optimizer)
    state.detach()
    _train(ddp, optimizer)
    return [p.detach().numpy().tobytes() for p in ddp.parameters()], len(found.states) if found else 0


def test_a_model_that_the_script_attaches_to_is_left_alone_also_after_detach() -> None:
    assert run_ranks(_attached_by_the_script, 2, True) == run_ranks(_attached_by_the_script, 2, False)


def _another_forward() -> tuple[int, int]:
    found, ddp, calls = dx.auto(**OPTIONS), _network(), []
    inside = ddp.forward

    def counting(*args: Any) -> Any:
        calls.append(None)
        return inside(*args)

    ddp.forward = counting  # type: ignore[method-assign]
    _train(ddp, AdamW(ddp.parameters(), lr=0.01))
    return len(calls), len(found.states)


def test_a_forward_that_the_script_has_wrapped_runs_once_each_time() -> None:
    assert run_ranks(_another_forward, 2) == [(STEPS, 0)] * 2


def _joined_from_the_first_batch() -> int:
    found, ddp = dx.auto(**OPTIONS), _network()
    optimizer = AdamW(ddp.parameters(), lr=0.01)
    with ddp.join():
        for x in [] if dist.get_rank() else [*_batches()]:
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
    return len(found.states)


def test_a_rank_without_batches_under_join_is_not_waited_for() -> None:
    assert run_ranks(_joined_from_the_first_batch, 2) == [0, 0]


def _one_rank_has_another_hook() -> tuple[str, list[str]]:
    with heard() as said:
        found, ddp = dx.auto(**OPTIONS), _network()
        optimizer = (torch.optim.LBFGS if dist.get_rank() else SGD)(ddp.parameters(), lr=0.1)
        x = torch.ones(2, INPUTS)
        ddp(x).square().mean().backward()
        optimizer.step(lambda: torch.zeros(()))
    return f"{len(found.states)} attached", said


def test_what_one_rank_refuses_is_attached_to_on_no_rank() -> None:
    (first, said), (second, silent) = run_ranks(_one_rank_has_another_hook, 2)
    assert first == second == "0 attached"
    assert len(said) == 1 and "trains as plain DDP: LBFGS" in said[0] and not silent


@pytest.mark.parametrize("options", [{"fusion_mb": -1}, {"schedule": "fast"}, {"no_such": 1}])
def test_options_that_no_model_could_take_are_refused_at_once(options) -> None:
    with pytest.raises((TypeError, ValueError)):
        dx.auto(**options)


def _switched_off() -> tuple[bool, bool, int]:
    os.environ["DDP_CROSSOVER"] = "off"
    ddp = _network()
    optimizer = SGD(ddp.parameters(), lr=0.1)
    state = dx.attach(ddp, optimizer, **OPTIONS)
    _train(ddp, optimizer)
    state.clip_grad_norm_(1.0)
    state.synchronize()
    by_hand = _network()
    state_by_hand = dx.DearState(by_hand, SGD(by_hand.parameters(), lr=0.1), wire_dtype=torch.bfloat16)
    by_hand.register_comm_hook(state_by_hand, dx.dear_hook)
    by_hand(torch.ones(2, INPUTS)).sum().backward()
    return state.detached, state.plan is None, state.stats().pipelined_iterations


def test_the_switch_turns_everything_off() -> None:
    assert run_ranks(_switched_off, 2) == [(True, True, 0)] * 2


def _averaged_while_off() -> tuple[bool, int]:
    os.environ["DDP_CROSSOVER"] = "off"
    ddp = _network()
    optimizer = AdamW(ddp.parameters(), lr=0.01)
    state = dx.attach(ddp, optimizer)
    updated: list[torch.Tensor] = []
    state.after_update(updated.extend)
    ema = dx.Ema(state, decay=0.5)
    expected = AveragedModel(ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for x in _batches():
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
        expected.update_parameters(ddp.module)
    pairs = zip(ema.module.parameters(), expected.module.parameters(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs), len(updated)


def test_averages_are_kept_while_switched_off() -> None:
    parameters = len([*DeepNet().parameters()])
    assert run_ranks(_averaged_while_off, 2) == [(True, STEPS * parameters)] * 2


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_CROSSOVER", "maybe")
    with pytest.raises(ValueError, match="DDP_CROSSOVER=maybe in the environment is neither on nor off"):
        dx.auto()
