"""Loops that copy, save, replace or swap parameters between `optimizer.step()` and the next forward."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from comparison import snapshot
from equivalence import Run, plain_loop
from models import HIDDEN, INPUTS, OUTPUTS


def by_deepcopy(value: Any) -> Any:
    """`copy.deepcopy`."""
    return copy.deepcopy(value)


def by_pickle(value: Any) -> Any:
    """Through pickled bytes."""
    return pickle.loads(pickle.dumps(value))


def by_save(value: Any) -> Any:
    """`torch.save` of the object itself, and back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def train_a_copied_parameter(run: Run, copied: Callable[[Any], Any]) -> Iterator[Any]:
    """Copies of parameters from a list made before are trained on by themselves, by plain means."""
    parameters = list(run.model.parameters())
    for loss in plain_loop(run):
        others = [copied(p) for p in parameters]
        taken = snapshot(others)
        optimizer = torch.optim.SGD(others, lr=0.5)
        torch.stack([p.square().sum() for p in others]).sum().backward()
        optimizer.step()
        yield loss, taken, snapshot(others), _kinds(others)


def _kinds(parameters: Any) -> list[Any]:
    return [(type(p).__name__, p.requires_grad, p.is_leaf, sorted(vars(p))) for p in parameters]


def make_another_of_the_same_type(run: Run) -> Iterator[Any]:
    """Loaders of checkpoints and quantizers say `type(p)(value)`."""
    parameters = list(run.model.parameters())
    for loss in plain_loop(run):
        others = [type(p)(p.data.clone(), requires_grad=False) for p in parameters]
        yield loss, snapshot(others), _kinds(others)


def replace_data_unread(run: Run) -> Iterator[Any]:
    """New memory, with values that owe nothing to the old ones, as a restart of some layers."""
    parameters = list(run.model.parameters())
    for index, loss in enumerate(plain_loop(run)):
        for p in parameters[index % 4 :: 4]:
            p.data = torch.full(p.shape, 0.01 * (1 + index))
        yield loss, snapshot(parameters)


def exchange_data(run: Run) -> Iterator[Any]:
    """Two layers exchange their memory."""
    weights = [p for p in run.model.parameters() if p.shape == (HIDDEN, HIDDEN)]
    for index, loss in enumerate(plain_loop(run)):
        one, other = weights[index % 3], weights[3]
        one.data, other.data = other.data, one.data
        yield loss


def swap_with_another(run: Run) -> Iterator[Any]:
    """`torch.utils.swap_tensors` refuses a parameter that DDP holds, and has changed nothing then."""
    parameter = run.model.module.first.weight
    for loss in plain_loop(run):
        other = nn.Parameter(torch.full(parameter.shape, 0.25))
        refused = False
        try:
            torch.utils.swap_tensors(parameter, other)
        except RuntimeError:
            refused = True
        yield loss, refused, snapshot(parameter), snapshot(other), _kinds([parameter, other])


class HookedNormNet(nn.Module):
    """The older weight and spectral norm: a pre-forward hook computes `weight`, from outside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.weight_norm(nn.Linear(INPUTS, HIDDEN))
        self.middle = nn.utils.spectral_norm(nn.Linear(HIDDEN, HIDDEN))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(HIDDEN, OUTPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class PrunedNet(nn.Module):
    """Pruned from the start: `weight` is computed from `weight_orig` and a mask before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = prune.l1_unstructured(nn.Linear(INPUTS, HIDDEN), "weight", amount=0.3)
        self.second = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def read_computed_weights(run: Run) -> Iterator[Any]:
    """What `weight` is of layers that compute it, read after the step."""
    layers = [layer for layer in run.model.module.modules() if isinstance(layer, nn.Linear)]
    for loss in plain_loop(run):
        yield loss, snapshot([layer.weight for layer in layers])
