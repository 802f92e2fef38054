"""A training loop whose every step draws what it does, the same on all ranks and in both arms."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from equivalence import Run, snapshot


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
        self.run.consolidate()
        return snapshot([one.state_dict() for one in self.run.optimizers])

    def load(self) -> None:
        module = self.run.model.module
        module.load_state_dict(snapshot(module.state_dict()))
        self.run.consolidate()
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
