"""Several states on one object: one optimizer, one module, one function that follows updates. None covers another, and
one that is detached takes nothing from the other, whichever comes first. Two that come and go together the fuzzer draws
(`second`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import ddp_crossover as dx
from equivalence import SMALL_GROUPS_MB
from stale_loops import LIMIT

STEPS = 10
STEP_IN_PIPELINE = 6
WIDTH = 8


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Pair:
    """Two models in one loss, with one optimizer; `attach` says which of them are attached, in which order."""

    def __init__(self, attach: tuple[int, ...], *options: dict[str, Any], net: Callable[[], nn.Module] = _net) -> None:
        torch.manual_seed(0)
        self.nets = [net(), net()]
        unused = net is not _net
        self.models = [DistributedDataParallel(one, find_unused_parameters=unused) for one in self.nets]
        self.parameters = [parameter for net in self.nets for parameter in net.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.9)
        options = options or ({}, {})
        self.states = {
            one: dx.attach(self.models[one], self.optimizer, **({"fusion_mb": SMALL_GROUPS_MB} | options[one]))
            for one in attach
        }

    def steps(self, first: int = 0, end: int = STEPS) -> Iterator[int]:
        for step in range(first, end):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
            self.optimizer.zero_grad()
            self.models[1](self.models[0](x)).pow(2).mean().backward()
            self.optimizer.step()
            yield step

    def momenta(self, state: Any) -> list[Tensor]:
        return [own["momentum_buffer"].clone() for own in state.values()]

    def end(self) -> list[Tensor]:
        seen = [parameter.detach().clone() for parameter in self.parameters]
        seen += [self.optimizer.state[parameter]["momentum_buffer"].clone() for parameter in self.parameters]
        for state in self.states.values():
            state.detach()
        return seen


def read(pair: Pair) -> list[Tensor]:
    return pair.momenta(pair.optimizer.state)


def edit(pair: Pair) -> list[Tensor]:
    for own in pair.optimizer.state.values():
        own["momentum_buffer"].mul_(0.5)
    return []


def replace(pair: Pair) -> list[Tensor]:
    pair.optimizer.state = copy.deepcopy(pair.optimizer.state)
    keys = list(pair.optimizer.state)
    for parameter, key in zip(pair.parameters, keys, strict=True):
        pair.optimizer.state[parameter] = pair.optimizer.state.pop(key)
    return read(pair)


def add_a_hook(pair: Pair) -> list[Tensor]:
    def slow_down(optimizer: Optimizer, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9

    pair.optimizer.register_step_pre_hook(slow_down)
    return []


def detach_first(pair: Pair) -> list[Tensor]:
    if 0 in pair.states:
        pair.states[0].detach()
    return read(pair)


def detach_second(pair: Pair) -> list[Tensor]:
    if 1 in pair.states:
        pair.states[1].detach()
    return read(pair)


def detach_and_attach_anew(pair: Pair) -> list[Tensor]:
    if 0 in pair.states:
        pair.states[0].detach()
        pair.states[0] = dx.attach(pair.models[0], pair.optimizer, fusion_mb=SMALL_GROUPS_MB)
    return read(pair)


LOOKS = [read, edit, replace, add_a_hook, detach_first, detach_second, detach_and_attach_anew]


def _train(look: Callable[[Pair], list[Tensor]], attach: tuple[int, ...], *options: dict[str, Any]) -> list[Tensor]:
    pair = Pair(attach, *options)
    seen: list[Tensor] = []
    for step in pair.steps():
        if step >= STEP_IN_PIPELINE and step % 2 == 0:
            seen += look(pair)
    seen += read(pair) + pair.end()
    assert type(pair.optimizer.state).__name__ == "defaultdict"
    return seen


def _same(look: Callable[[Pair], list[Tensor]], attach: tuple[int, ...], *options: dict[str, Any]) -> None:
    plain, ours = _train(look, ()), _train(look, attach, *options)
    assert len(plain) == len(ours)
    for one, other in zip(plain, ours, strict=True):
        assert torch.equal(one, other)


@pytest.mark.quick
@pytest.mark.parametrize("attach", [(0, 1), (1,)], ids=str)
@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
def test_the_state_of_the_optimizer_has_the_updates_of_both(on_ranks, look, attach) -> None:
    on_ranks(_same, 2, look, attach)


@pytest.mark.parametrize("plain", [0, 1])
@pytest.mark.parametrize("look", [read, edit], ids=lambda look: look.__name__)
def test_one_of_the_models_takes_plain_all_reduces(on_ranks, look, plain) -> None:
    options: list[dict[str, Any]] = [{}, {}]
    options[plain] = {"schedule": "allreduce"}
    on_ranks(_same, 2, look, (0, 1), *options)


class _Late(nn.Module):
    """Uses its second layer only once the pipeline runs, so that its state is made by a deferred update."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.first(x)
        return h + self.second(h) if self.calls > STEP_IN_PIPELINE else h


def _state_is_made_in_the_pipeline(leave: int | None, options: list[dict[str, Any]]) -> None:
    ends = []
    for attach in ((), (0, 1)):
        pair = Pair(attach, *options, net=_Late)
        for step in pair.steps():
            if step == STEP_IN_PIPELINE and leave in pair.states:
                pair.states[leave].detach()
        ends.append(pair.end())
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("leave", [None, 0, 1])
@pytest.mark.parametrize("plain", [None, 0, 1])
def test_state_that_a_deferred_update_makes_is_kept(on_ranks, leave, plain) -> None:
    options: list[dict[str, Any]] = [{}, {}]
    if plain is not None:
        options[plain] = {"schedule": "allreduce"}
    on_ranks(_state_is_made_in_the_pipeline, 2, leave, options)


def _clamped(leave: int) -> None:
    """Each model's function sees its own parameters, and one that is of neither, once a step, also after the other was
    detached; from then on it sees those of the other, too, which belong to no attached model.
    """
    pair = Pair((0, 1))
    of_neither = nn.Parameter(torch.ones(3))
    pair.optimizer.add_param_group({"params": [of_neither]})
    seen: list[list[int]] = [[], []]
    for one, state in pair.states.items():
        own = {id(p): index for index, p in enumerate([*pair.nets[one].parameters(), of_neither])}

        def clamp(parameters: list[Tensor], one: int = one, own: dict[int, int] = own) -> None:
            seen[one] += [own.get(id(parameter), -1) for parameter in parameters]
            for parameter in parameters:
                parameter.clamp_(-LIMIT, LIMIT)

        state.after_update(clamp)
    for step in pair.steps():
        if step == STEP_IN_PIPELINE:
            pair.states[leave].detach()
            assert -1 not in seen[leave]
    pair.states[1 - leave].synchronize()
    for one in (0, 1):
        assert sorted(index for index in seen[one] if index >= 0) == sorted([*range(5)] * STEPS), seen[one]
    assert -1 not in seen[leave]
    pair.states[1 - leave].detach()


@pytest.mark.parametrize("leave", [0, 1])
def test_functions_that_follow_updates_see_their_own_model(on_ranks, leave) -> None:
    on_ranks(_clamped, 2, leave)


def _one_compiled_block_in_two_models(leave: tuple[int, int]) -> None:
    results = []
    for attach in ((), (0, 1)):
        torch.manual_seed(0)
        block = _net()
        block.compile(backend="eager")
        nets = [nn.Sequential(block, nn.Linear(WIDTH, WIDTH)), nn.Sequential(nn.Linear(WIDTH, WIDTH), block)]
        models = [DistributedDataParallel(net) for net in nets]
        optimizers: list[Optimizer] = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
        states = {one: dx.attach(models[one], optimizers[one], fusion_mb=SMALL_GROUPS_MB) for one in attach}
        own = vars(block)["_compiled_call_impl"]
        for step in range(2 * STEPS):
            one = step % 2
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
            optimizers[one].zero_grad()
            models[one](x).pow(2).mean().backward()
            optimizers[one].step()
            if states and step in (14, 17):
                states[leave[step == 17]].detach()
        results.append([p.detach().clone() for net in nets for p in net.parameters()])
        if attach:
            assert vars(block)["_compiled_call_impl"] is not own  # that was one of ours
            assert type(vars(block)["_compiled_call_impl"]).__name__ != "_AroundCompiled"
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("leave", [(0, 1), (1, 0)], ids=str)
def test_a_compiled_module_of_two_models_is_left_as_it_was(on_ranks, leave) -> None:
    on_ranks(_one_compiled_block_in_two_models, 2, leave)
