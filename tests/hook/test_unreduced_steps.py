"""Steps whose gradients DDP has not reduced are named, once, with the line; those that a script asked for are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from equivalence import SMALL_GROUPS_MB
from heard import heard
from unreduced import (
    IN_PIPELINE,
    STEPS,
    Script,
    Step,
    alone_on_purpose,
    averaged_after_no_sync,
    parametrized,
    past_ddp,
    second_backward,
    second_backward_alone,
)

# Faults.


def past_ddp_and_clipped(script: Script, step: int) -> None:
    past_ddp(script, step)
    nn.utils.clip_grad_norm_(script.net.parameters(), 0.1)


def past_ddp_and_clipped_by_value(script: Script, step: int) -> None:
    past_ddp(script, step)
    _clip_half(script)


def _clip_half(script: Script) -> None:
    for parameter in script.net.parameters():
        assert parameter.grad is not None
        nn.utils.clip_grad_value_(parameter, parameter.grad.abs().median().item())


def moved_and_back(script: Script, step: int) -> None:
    if script.net[0].weight.grad is None and not hasattr(script, "is_moved"):
        script.is_moved = True
        script.net.double().float()  # on another device it would be `.cpu().cuda()`
    script.backward(step)


PAST = "did not come from a forward of DDP. Call ddp(x) in training, not ddp.module(x)"
SECOND = "came after the one that DDP has reduced, and DDP reduces one for each forward. Add up losses"
MOVED = "was not seen by DDP, although its forward ran. Move, cast and parametrize parameters"
FAULTS = {
    past_ddp: PAST,
    past_ddp_and_clipped: PAST,
    past_ddp_and_clipped_by_value: PAST,
    second_backward: SECOND,
    second_backward_alone: SECOND,
    moved_and_back: MOVED,
}


def _heard(kind: Step, first: int, options: dict[str, Any]) -> list[str]:
    with heard() as said:
        script = Script(options)
        script.train(kind, first)
        assert script.state is not None
        script.state.detach()
    return [line for line in said if "not reduced by DDP" in line]


@pytest.mark.parametrize("options", [{}, {"schedule": "allreduce"}], ids=["pipeline", "allreduce"])
@pytest.mark.parametrize("first", [0, IN_PIPELINE])
@pytest.mark.parametrize(("kind", "cause"), FAULTS.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_a_fault_is_said_once_with_parameter_and_line(on_ranks, kind, cause, first, options) -> None:
    [said], other = on_ranks(_heard, 2, kind, first, options)
    assert said.startswith("SGD.step() at unreduced.py:") and cause in said, said
    assert "the gradient of 0.weight was not reduced by DDP in this step, so ranks train apart" in said
    assert "because the backward at unreduced.py:" in said
    assert not other  # rank 0 speaks


def _heard_of_a_parametrized_layer() -> list[str]:
    with heard() as said:
        Script({}, {"find_unused_parameters": True}).train(parametrized)
    return [line for line in said if "not reduced by DDP" in line]


def test_a_parameter_that_ddp_has_lost_sight_of_is_named(on_ranks) -> None:
    [said], _ = on_ranks(_heard_of_a_parametrized_layer, 2)
    assert "the gradient of 0.weight was not reduced by DDP" in said and MOVED.split(",")[0] in said, said


# What a script has asked for, or does by itself.


def accumulated(script: Script, step: int) -> None:
    for part in range(2):
        with script.model.no_sync(), script.batch():
            script.model(script.x(100 * step + part)).pow(2).mean().backward()
    script.backward(step)


def alone_on_purpose_past_ddp(script: Script, step: int) -> None:
    with script.model.no_sync():
        past_ddp(script, step)
        script.optimizer.step()


def averaged_past_ddp(script: Script, step: int) -> None:
    past_ddp(script, step)
    script.average()


def averaged_past_ddp_and_clipped(script: Script, step: int) -> None:
    averaged_past_ddp(script, step)
    nn.utils.clip_grad_norm_(script.net.parameters(), 0.1)


def averaged_past_ddp_and_clipped_by_value(script: Script, step: int) -> None:
    averaged_past_ddp(script, step)
    _clip_half(script)


def evaluated(script: Script, step: int) -> None:
    script.backward(step)
    script.net.eval()
    with torch.no_grad():
        script.net(script.x(step))
    script.net.train()
    torch.autograd.grad(script.net(script.x(step)).sum(), list(script.net.parameters()))


def set_by_hand(script: Script, step: int) -> None:
    gradients = torch.autograd.grad(script.net(script.x(step)).sum(), list(script.net.parameters()))
    for parameter, gradient in zip(script.net.parameters(), gradients, strict=True):
        parameter.grad = gradient


def noise_by_hand(script: Script, step: int) -> None:
    for parameter in script.net.parameters():
        parameter.grad = torch.full_like(parameter, 0.01 * step)


def no_gradient(script: Script, step: int) -> None:
    pass


def stepped_twice(script: Script, step: int) -> None:
    script.backward(step)
    script.optimizer.step()


def changed_by_hand(script: Script, step: int) -> None:
    script.backward(step)
    for parameter in script.net.parameters():
        parameter.grad = parameter.grad * 0.5  # type: ignore[operator]


def polluted_and_zeroed(script: Script, step: int) -> None:
    """As a generator's backward through a discriminator does, whose gradients are dropped before its own."""
    past_ddp(script, step)
    script.optimizer.zero_grad()
    script.backward(step)


NO_FAULTS = [
    accumulated,
    alone_on_purpose,
    alone_on_purpose_past_ddp,
    averaged_after_no_sync,
    averaged_past_ddp,
    averaged_past_ddp_and_clipped,
    averaged_past_ddp_and_clipped_by_value,
    evaluated,
    set_by_hand,
    noise_by_hand,
    no_gradient,
    stepped_twice,
    changed_by_hand,
    polluted_and_zeroed,
]


@pytest.mark.parametrize("first", [0, IN_PIPELINE])
@pytest.mark.parametrize("kind", NO_FAULTS, ids=lambda one: one.__name__)
def test_nothing_is_said_of_what_a_script_does_on_purpose(on_ranks, kind, first) -> None:
    assert on_ranks(_heard, 2, kind, first, {}) == [[], []]


def _heard_of_ignored() -> list[str]:
    with heard() as said:
        Script({}, ignored=("0.weight", "0.bias")).train()
    return [line for line in said if "not reduced" in line]


def test_nothing_is_said_of_parameters_that_ddp_ignores(on_ranks) -> None:
    assert on_ranks(_heard_of_ignored, 2) == [[], []]


def test_one_rank_has_nobody_to_reduce_with(on_ranks) -> None:
    assert on_ranks(_heard, 1, past_ddp, 0, {}) == [[]]


def _two_optimizers() -> list[str]:
    with heard() as said:
        script = Script(None)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (script.net[0], script.net[2])]
        script.state = dx.attach(script.model, optimizers, fusion_mb=SMALL_GROUPS_MB)
        for step in range(STEPS):
            script.model.zero_grad()
            script.backward(step)
            for optimizer in optimizers:
                optimizer.step()
    return [line for line in said if "not reduced" in line]


def test_each_of_two_optimizers_has_its_step(on_ranks) -> None:
    assert on_ranks(_two_optimizers, 2) == [[], []]


# Where other numbers would come of it.


def _refused(kind: Step, first: int, options: dict[str, Any]) -> str:
    try:
        _heard(kind, first, options)
    except RuntimeError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("first", [0, IN_PIPELINE])
@pytest.mark.parametrize("kind", [past_ddp, second_backward, second_backward_alone, moved_and_back])
def test_gradients_that_are_not_weighted_are_refused(on_ranks, kind, first) -> None:
    for said in on_ranks(_refused, 2, kind, first, {"weighted": True}):
        assert "not reduced" in said and "not weighted (weighted=True)" in said, said


@pytest.mark.parametrize("kind", [past_ddp, second_backward, moved_and_back])
def test_shards_of_them_are_refused(on_ranks, kind) -> None:
    for said in on_ranks(_refused, 2, kind, IN_PIPELINE, {"shard_optimizer": True}):
        assert "not the same on all ranks" in said and "ddp.module" in said, said


# A group of one rank.


def _heard_at_attach(is_own_group: bool, started: str) -> list[str]:
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch, heard() as said:
        patch.setenv("WORLD_SIZE", started)
        patch.setenv("RANK", str(dist.get_rank()))
        Script({}, {"process_group": group if is_own_group else None})
    return [line for line in said if "has one rank" in line]


def test_a_group_of_one_rank_is_said_beside_others(on_ranks) -> None:
    [said], other = on_ranks(_heard_at_attach, 2, True, "2")
    assert "each process trains on its own, although there are 2 ranks: leave out process_group=" in said
    assert not other
    [[said]] = on_ranks(_heard_at_attach, 1, False, "2")
    assert "although 2 were started (WORLD_SIZE in the environment): leave out rank= and world_size=" in said
    assert on_ranks(_heard_at_attach, 1, False, "1") == on_ranks(_heard_at_attach, 1, False, "") == [[]]
    assert on_ranks(_heard_at_attach, 2, False, "2") == [[], []]


# Parameters that came after DDP was built.


def _heard_of_a_new_head(is_new: bool) -> list[str]:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    if is_new:
        ddp.module[1] = nn.Linear(4, 2)
    with heard() as said:
        dx.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)).detach()
    return [line for line in said if "came into the model" in line]


def test_parameters_that_came_after_ddp_was_built_are_said(on_ranks) -> None:
    [said], other = on_ranks(_heard_of_a_new_head, 2, True)
    assert said.startswith("1.weight and 1 more") and "Build DistributedDataParallel after such changes" in said
    assert not other
    assert on_ranks(_heard_of_a_new_head, 2, False) == [[], []]
