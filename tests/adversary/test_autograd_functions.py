"""`autograd.Function`s over parameters, and unusual ways to record what happens."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam

from adversarial import PAST_EVERYTHING, Script, adversarial
from adversary.nets import fit, mlp, mse, train_step


class GradScale(torch.autograd.Function):
    """Returns its input itself, for which torch makes another name."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0.5


class ScaledLayer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, GradScale.apply(self.weight), self.bias) + 0.01 * self.weight.sum()


@adversarial(refused=PAST_EVERYTHING, strict=False)
def test_layer_with_scaled_gradients_is_evaluated(run: Script) -> None:
    net = nn.Sequential(ScaledLayer(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer = run.train(net, SGD, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with torch.no_grad():
            run.log(net(x))


class SavesWeight(torch.autograd.Function):
    """Saves a parameter for backward, and does not look at it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (weight,) = ctx.saved_tensors
        return grad, 0.01 * weight


class Decayed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(SavesWeight.apply(x, self.first.weight))))


# Its version is noted before the update that is pending, and autograd compares it in backward.
@adversarial(refused="modified by an inplace operation")
def test_function_saves_a_parameter_before_anybody_uses_it(run: Script) -> None:
    fit(run, *run.train(Decayed(), SGD, lr=0.05))


@adversarial()
def test_compiled_model_with_a_function_of_its_own(run: Script) -> None:
    net = nn.Sequential(ScaledLayer(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer = run.train(net, SGD, lr=0.05)
    net.compile(backend="aot_eager", fullgraph=True)
    fit(run, model, optimizer)


@adversarial(fallback="allow_mutation_on_saved_tensors")
def test_saved_values_are_kept_over_a_step(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)
    for x, y in run.batches():
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            optimizer.zero_grad()
            x.requires_grad_()
            loss = mse(model(x), y)
            penalty = net(x * 2).pow(2).sum()
            loss.backward()
            optimizer.step()
            run.log(torch.autograd.grad(penalty, x)[0])


@adversarial()
def test_execution_trace_records_some_steps(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.05)
    with tempfile.TemporaryDirectory() as folder:
        observer = torch.profiler.ExecutionTraceObserver().register_callback(f"{folder}/trace.json")
        try:
            observer.start()
            fit(run, model, optimizer)
            observer.stop()
        finally:
            observer.unregister_callback()


@adversarial()
def test_finalizers_read_parameters_whenever_garbage_is_collected(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            net[0].weight.norm()

    before = gc.get_threshold()
    gc.set_threshold(10, 2, 2)
    try:
        for x, y in run.batches(30):
            for _ in range(5):
                Cycle()
            train_step(model, optimizer, x, y)
    finally:
        gc.set_threshold(*before)
