"""Optimizers whose update is compiled, and a compiled `step()`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from equivalence import Run, train_step


def _update(parameter: Tensor, gradient: Tensor, momentum: Tensor, lr: float) -> None:
    momentum.mul_(0.9).add_(gradient)
    parameter.sub_(momentum * lr)


class CompiledMomentum(torch.optim.Optimizer):
    """As low-bit optimizers do it: the update of one parameter is a compiled function.

    `keeps` is an attribute that could be anything, so that updates are not deferred.
    """

    def __init__(self, parameters: Any, keeps: Any = None) -> None:
        super().__init__(parameters, {"lr": 0.01})
        if keeps is not None:
            self.keeps = keeps

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        update = torch.compile(_update, backend="aot_eager")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    update(p, p.grad, state.setdefault("momentum", torch.zeros_like(p)), group["lr"])
        return loss


def with_something_of_its_own(model: nn.Module) -> CompiledMomentum:
    """Not deferred."""
    return CompiledMomentum(model.parameters(), keeps=_update)


def compiled_momentum(model: nn.Module) -> CompiledMomentum:
    """Deferred."""
    return CompiledMomentum(model.parameters())


def reset_loop(run: Run) -> Iterator[Any]:
    """The compiler forgets everything now and then."""
    torch.compiler.reset()
    for index, (x, y) in enumerate(run.batches()):
        if index % 4 == 3:
            torch.compiler.reset()
        loss = train_step(run, x, y)
        yield loss


def compiled_step(run: Run) -> Iterator[Any]:
    """`torch.compile(optimizer.step)`, which is not compiled in every step."""
    torch.compiler.reset()
    counters.clear()
    step = torch.compile(lambda: run.optimizer.step(), backend="aot_eager")
    graphs = []
    for x, y in run.batches():
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        step()
        graphs.append(counters["stats"]["unique_graphs"])
        yield loss
    yield graphs[-1] == graphs[len(graphs) // 2]


def compiled_clipping(run: Run) -> Iterator[Any]:
    """Compiled functions that take gradients in, by themselves and as arguments."""
    torch.compiler.reset()
    counters.clear()
    parameters: list[Any] = list(run.model.parameters())

    @torch.compile(backend="aot_eager")
    def norm_of(gradients: list[Tensor]) -> Tensor:
        return torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()

    @torch.compile(backend="aot_eager")
    def clip(norm: Tensor) -> None:
        for p in parameters:
            p.grad.mul_(torch.clamp(0.5 / norm, max=1.0))

    graphs = []
    for x, y in run.batches():
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        norm = norm_of([p.grad for p in parameters])
        clip(norm)
        run.optimizer.step()
        graphs.append(counters["stats"]["unique_graphs"])
        yield loss, norm
    yield graphs[-1] == graphs[len(graphs) // 2]
