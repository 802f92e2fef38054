"""Steps whose gradients DDP has not reduced are named, once, with the line; those that a script asked for are not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import ddp_crossover as dx
from equivalence import SMALL_GROUPS_MB
from heard import heard

STEPS = 11
IN_PIPELINE = 7
WIDTH = 6


class Script:
    """Trains a small model, with a loss of ordinary size on each rank's own data."""

    ignored: tuple[str, ...] = ()

    def __init__(self, group: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.net, list(self.ignored))
        self.model = DistributedDataParallel(self.net, process_group=group)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        options.setdefault("fusion_mb", SMALL_GROUPS_MB)
        if options.get("schedule") == "allreduce":
            options.pop("fusion_mb")
        self.state = dx.attach(self.model, self.optimizer, **options)
        self.is_weighted = options.get("weighted", False)

    def x(self, step: int) -> Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))

    def batch(self) -> contextlib.AbstractContextManager[Any]:
        return self.state.batch(4) if self.is_weighted else contextlib.nullcontext()

    def backward(self, step: int) -> None:
        with self.batch():
            self.model(self.x(step)).pow(2).mean().backward()

    def average(self) -> None:
        """What a script does that averages gradients by itself."""
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


Step = Callable[[Script, int], None]


# Faults.


def past_ddp(script: Script, step: int) -> None:
    with script.batch():
        script.model.module(script.x(step)).pow(2).mean().backward()


def past_ddp_and_clipped(script: Script, step: int) -> None:
    past_ddp(script, step)
    nn.utils.clip_grad_norm_(script.net.parameters(), 0.1)


def second_backward(script: Script, step: int) -> None:
    x = script.x(step).requires_grad_()
    with script.batch():
        output = script.model(x)
        output.pow(2).mean().backward(retain_graph=True)
        [gradient] = torch.autograd.grad(output.sum(), x, create_graph=True)
        gradient.pow(2).mean().backward()


def second_backward_alone(script: Script, step: int) -> None:
    with script.batch():
        output = script.model(script.x(step))
        output.pow(2).mean().backward(retain_graph=True)
        script.optimizer.zero_grad()
        output.abs().mean().backward()


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
    second_backward: SECOND,
    second_backward_alone: SECOND,
    moved_and_back: MOVED,
}


def _heard(kind: Step, first: int, options: dict[str, Any]) -> list[str]:
    with heard() as said:
        script = Script(**options)
        for step in range(STEPS):
            script.optimizer.zero_grad()
            if step >= first:
                kind(script, step)
            else:
                script.backward(step)
            script.optimizer.step()
        script.state.detach()
    return [line for line in said if "not reduced by DDP" in line]


@pytest.mark.parametrize("options", [{}, {"schedule": "allreduce"}], ids=["pipeline", "allreduce"])
@pytest.mark.parametrize("first", [0, IN_PIPELINE])
@pytest.mark.parametrize(("kind", "cause"), FAULTS.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_a_fault_is_said_once_with_parameter_and_line(on_ranks, kind, cause, first, options) -> None:
    [said], other = on_ranks(_heard, 2, kind, first, options)
    assert said.startswith("SGD.step() at test_unreduced_steps.py:") and cause in said, said
    assert "the gradient of 0.weight was not reduced by DDP in this step, so ranks train apart" in said
    assert "because the backward at test_unreduced_steps.py:" in said
    assert not other  # rank 0 speaks


class _Negative(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return -weight


def _heard_of_a_parametrized_layer() -> list[str]:
    with heard() as said:
        script = Script()
        script.state.detach()
        script.model = DistributedDataParallel(script.net, find_unused_parameters=True)
        script.state = dx.attach(script.model, script.optimizer, fusion_mb=SMALL_GROUPS_MB)
        parametrize.register_parametrization(script.net[2], "weight", _Negative())
        for step in range(STEPS):
            script.optimizer.zero_grad()
            script.backward(step)
            script.optimizer.step()
    return [line for line in said if "not reduced by DDP" in line]


def test_a_parameter_that_ddp_has_lost_sight_of_is_named(on_ranks) -> None:
    [said], _ = on_ranks(_heard_of_a_parametrized_layer, 2)
    assert "the gradient of 2.weight was not reduced by DDP" in said and MOVED.split(",")[0] in said, said


# What a script has asked for, or does by itself.


def accumulated(script: Script, step: int) -> None:
    for part in range(2):
        with script.model.no_sync(), script.batch():
            script.model(script.x(100 * step + part)).pow(2).mean().backward()
    script.backward(step)


def alone_on_purpose(script: Script, step: int) -> None:
    with script.model.no_sync():
        script.backward(step)


def alone_on_purpose_past_ddp(script: Script, step: int) -> None:
    with script.model.no_sync():
        past_ddp(script, step)
        script.optimizer.step()


def averaged_after_no_sync(script: Script, step: int) -> None:
    with script.model.no_sync():
        script.backward(step)
    script.average()


def averaged_past_ddp(script: Script, step: int) -> None:
    past_ddp(script, step)
    script.average()


def averaged_past_ddp_and_clipped(script: Script, step: int) -> None:
    averaged_past_ddp(script, step)
    nn.utils.clip_grad_norm_(script.net.parameters(), 0.1)


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


class Ignoring(Script):
    ignored = ("0.weight", "0.bias")


def _heard_of_ignored() -> list[str]:
    with heard() as said:
        script = Ignoring()
        for step in range(STEPS):
            script.optimizer.zero_grad()
            script.backward(step)
            script.optimizer.step()
    return [line for line in said if "not reduced" in line]


def test_nothing_is_said_of_parameters_that_ddp_ignores(on_ranks) -> None:
    assert on_ranks(_heard_of_ignored, 2) == [[], []]


def test_one_rank_has_nobody_to_reduce_with(on_ranks) -> None:
    assert on_ranks(_heard, 1, past_ddp, 0, {}) == [[]]


def _two_optimizers() -> list[str]:
    with heard() as said:
        script = Script()
        script.state.detach()
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
        Script(group=group if is_own_group else None).state.detach()
    return [line for line in said if "has one rank" in line]


def test_a_group_of_one_rank_is_said_beside_others(on_ranks) -> None:
    [said], other = on_ranks(_heard_at_attach, 2, True, "2")
    assert "each process trains on its own, although there are 2 ranks: leave out process_group=" in said
    assert not other
    [[said]] = on_ranks(_heard_at_attach, 1, False, "2")
    assert "although 2 were started (WORLD_SIZE in the environment): leave out rank= and world_size=" in said
    assert on_ranks(_heard_at_attach, 1, False, "1") == on_ranks(_heard_at_attach, 1, False, "") == [[]]
    assert on_ranks(_heard_at_attach, 2, False, "2") == [[], []]
