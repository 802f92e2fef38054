"""Loops that nobody would write: random sequences of what a script may do, against plain DDP, bit for bit.

The other files cross features in pairs. Here every step draws one of many things to do before backward, before
`step()` and after it, so that what one leaves behind meets what another expects.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from equivalence import ADAMW, SGD, Case, Run, check_case, optimizer, snapshot
from models import BatchNormNet, DeepNet, OddNet
from wirings import SkippingNet, TiedNet

SEEDS = range(16)
MODELS = [DeepNet, OddNet, BatchNormNet, TiedNet, SkippingNet]


def _two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [torch.optim.SGD(parameters[:2], lr=0.05, momentum=0.9), torch.optim.AdamW(parameters[2:], lr=0.01)]


OPTIMIZERS = [SGD, ADAMW, optimizer(torch.optim.AdamW, lr=0.01, fused=True), _two_optimizers]


class _Script:
    """The things to do. Each returns what the script would see by it."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run = run
        self.draw = random.Random(seed)
        self.parameters = list(run.model.module.parameters())
        self.batches = 0

    def one_of(self, *actions: Callable[[], Any]) -> Any:
        return self.draw.choice(actions)()

    def nothing(self) -> None:
        return None

    def zero(self, set_to_none: bool) -> None:
        for one in self.run.optimizers:
            one.zero_grad(set_to_none)

    def zero_model(self) -> None:
        self.run.model.zero_grad()

    def backward(self) -> torch.Tensor:
        x, y = self.run.batch(self.batches)
        self.batches += 1
        loss = self.run.loss(self.run.model(x), y)
        loss.backward()
        return loss

    def backward_without_sync(self) -> torch.Tensor:
        with self.run.model.no_sync():
            return self.backward()

    def gradients(self) -> Any:
        return snapshot([p.grad for p in self.parameters])

    def one_gradient(self) -> Any:
        return snapshot(self.parameters[0].grad)

    def halve_some(self) -> None:
        for p in self.parameters[::2]:
            if p.grad is not None:
                p.grad *= 0.5

    def drop_one(self) -> None:
        self.parameters[-1].grad = None

    def clip(self) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.parameters, 0.5)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for one in self.run.optimizers:
                one.step()

    def step_first(self) -> None:
        self.run.optimizer.step()

    def evaluate(self) -> torch.Tensor:
        module = self.run.model.module.eval()
        with torch.no_grad():
            output = module(self.run.batch(10_000)[0])
        module.train()
        return output

    def state(self) -> Any:
        return snapshot(self.run.model.state_dict())

    def optimizer_state(self) -> Any:
        return snapshot([one.state_dict() for one in self.run.optimizers])

    def load(self) -> None:
        module = self.run.model.module
        module.load_state_dict(snapshot(module.state_dict()))
        for one in self.run.optimizers:
            one.load_state_dict(copy.deepcopy(one.state_dict()))

    def read_parameters(self) -> Any:
        return snapshot(list(self.run.model.parameters()))

    def copy_module(self) -> Any:
        return snapshot(copy.deepcopy(self.run.model.module).state_dict())

    def decay(self) -> None:
        for one in self.run.optimizers:
            for group in one.param_groups:
                group["lr"] *= 0.97


def random_loop(run: Run, seed: int) -> Iterator[Any]:
    """`run.case.steps` steps of a script drawn from `seed`, the same on all ranks and in both arms."""
    run.attach()
    script = _Script(run, seed)
    accumulate = [script.backward_without_sync] if not run.case.ddp.get("find_unused_parameters") else []
    to_none, in_place = partial(script.zero, True), partial(script.zero, False)
    for _ in range(run.case.steps):
        yield [
            script.one_of(to_none, to_none, in_place, script.zero_model, script.nothing),
            script.one_of(script.nothing, script.nothing, script.nothing, script.backward, *accumulate),
            script.backward(),
            script.one_of(
                script.nothing,
                script.nothing,
                script.nothing,
                script.clip,
                script.gradients,
                script.one_gradient,
                script.halve_some,
                script.drop_one,
            ),
            script.one_of(
                script.step, script.step, script.step, script.nothing, partial(script.step, 2), script.step_first
            ),
            script.decay(),
            script.one_of(
                script.nothing,
                script.nothing,
                script.evaluate,
                script.state,
                script.optimizer_state,
                script.gradients,
                to_none,
                in_place,
                script.read_parameters,
                script.load,
                script.copy_module,
                run.synchronize,
            ),
        ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_loop_is_exact(on_ranks, seed, world_size) -> None:
    draw = random.Random(1000 * world_size + seed)
    model = draw.choice(MODELS)
    ddp = {
        "gradient_as_bucket_view": draw.random() < 0.5,
        "find_unused_parameters": model is SkippingNet or draw.random() < 0.15,
    }
    case = Case(
        partial(random_loop, seed=seed),
        model=model,
        optimizer=draw.choice(OPTIMIZERS),
        world_size=world_size,
        ddp=ddp,
        dear={"fusion_mb": draw.choice([1e-4, 3e-4, 8.0])},
        strict=draw.random() < 0.5,
        pipelined=False,  # many of these read too early to be fast
    )
    if draw.random() < 0.25:
        case = replace(case, dear={**case.dear, "wire_dtype": torch.bfloat16})
    check_case(case, on_ranks)
