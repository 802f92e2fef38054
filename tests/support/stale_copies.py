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

from equivalence import Run, snapshot, train_step
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


def train_a_copied_module(run: Run, copied: Callable[[Any], Any]) -> Iterator[Any]:
    """The copy is trained on by itself, by plain means, and the original goes its own way."""
    module = run.model.module
    for index, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
        if index % 4 != 2:
            yield loss
            continue
        other = copied(module)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(run.loss(other(x), y))
            losses[-1].backward()
            optimizer.step()
        yield loss, snapshot(losses), snapshot(other.state_dict()), _kinds(other.parameters())


def train_a_copied_parameter(run: Run, copied: Callable[[Any], Any]) -> Iterator[Any]:
    """The same with single parameters from a list made before."""
    parameters = list(run.model.parameters())
    for x, y in run.batches():
        loss = train_step(run, x, y)
        others = [copied(p) for p in parameters]
        taken = snapshot(others)
        optimizer = torch.optim.SGD(others, lr=0.5)
        torch.stack([p.square().sum() for p in others]).sum().backward()
        optimizer.step()
        yield loss, taken, snapshot(others), _kinds(others)


def _kinds(parameters: Any) -> list[Any]:
    return [(type(p).__name__, p.requires_grad, p.is_leaf, sorted(vars(p))) for p in parameters]


def write_through_a_shallow_copy(run: Run) -> Iterator[Any]:
    """`copy.copy(p)` is another parameter over the same memory."""
    parameters = list(run.model.parameters())
    for x, y in run.batches():
        loss = train_step(run, x, y)
        for p in parameters:
            copy.copy(p).data.mul_(0.97)
        yield loss, snapshot([copy.copy(p) for p in parameters])


def make_another_of_the_same_type(run: Run) -> Iterator[Any]:
    """Loaders of checkpoints and quantizers say `type(p)(value)`."""
    parameters = list(run.model.parameters())
    for x, y in run.batches():
        loss = train_step(run, x, y)
        others = [type(p)(p.data.clone(), requires_grad=False) for p in parameters]
        yield loss, snapshot(others), _kinds(others)


def keep_state_dicts(run: Run) -> Iterator[Any]:
    """Deep copies of state dicts of several steps, compared at the end."""
    kept = []
    for index, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
        if index % 5 == 2:
            kept.append(copy.deepcopy(run.model.module.state_dict(keep_vars=index % 2 == 0)))
        yield loss, snapshot(kept)


def replace_data_unread(run: Run) -> Iterator[Any]:
    """The same with values that owe nothing to the old ones, as a restart of some layers."""
    parameters = list(run.model.parameters())
    for index, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
        for p in parameters[index % 4 :: 4]:
            p.data = torch.full(p.shape, 0.01 * (1 + index))
        yield loss, snapshot(parameters)


def replace_frozen_by_set(run: Run) -> Iterator[Any]:
    """`p.set_(tensor)`: a frozen parameter gets another tensor's memory. (Plain DDP loses the gradients
    of a trained one, whose gradient accumulator `set_` resets.)
    """
    frozen = [p for p in run.model.parameters() if not p.requires_grad]
    for x, y in run.batches():
        loss = train_step(run, x, y)
        with torch.no_grad():
            for p in frozen:
                p.set_(p.detach().clone().mul_(0.95))
        yield loss


def exchange_data(run: Run) -> Iterator[Any]:
    """Two layers exchange their memory."""
    weights = [p for p in run.model.parameters() if p.shape == (HIDDEN, HIDDEN)]
    for index, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
        one, other = weights[index % 3], weights[3]
        one.data, other.data = other.data, one.data
        yield loss


def swap_with_another(run: Run) -> Iterator[Any]:
    """`torch.utils.swap_tensors` refuses a parameter that DDP holds, and has changed nothing then."""
    parameter = run.model.module.first.weight
    for x, y in run.batches():
        loss = train_step(run, x, y)
        other = nn.Parameter(torch.full(parameter.shape, 0.25))
        refused = False
        try:
            torch.utils.swap_tensors(parameter, other)
        except RuntimeError:
            refused = True
        yield loss, refused, snapshot(parameter), snapshot(other), _kinds([parameter, other])


def swap_frozen(run: Run) -> Iterator[Any]:
    """Swaps a frozen parameter, which no gradient node holds, while all others are pending."""
    frozen = run.model.module.first.weight
    for index, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
        if index % 5 == 3:
            other = nn.Parameter(torch.full(frozen.shape, 0.1 * index), requires_grad=False)
            torch.utils.swap_tensors(frozen, other)
        yield loss, snapshot(frozen)


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
    for x, y in run.batches():
        loss = train_step(run, x, y)
        yield loss, snapshot([layer.weight for layer in layers])


def call_one_layer(run: Run) -> Iterator[Any]:
    """One layer is called by itself after the step, in eval mode, and its hooks with it."""
    layer = run.model.module.first
    for x, y in run.batches():
        loss = train_step(run, x, y)
        layer.eval()
        with torch.no_grad():
            output = layer(x)
        layer.train()
        yield loss, output


def prune_in_mid_run(run: Run) -> Iterator[Any]:
    """Prunes further every few steps, by the size of the weights after the step; renames parameters."""
    layers = [run.model.module.first, run.model.module.second]
    for index, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
        if index % 6 == 4:
            for layer in layers:
                prune.l1_unstructured(layer, "weight", amount=0.2)
        yield loss, snapshot([layer.weight for layer in layers])


def make_pruning_permanent(run: Run) -> Iterator[Any]:
    """`prune.remove` writes the pruned value into the parameter and gives it its old name."""
    layer = run.model.module.second
    for index, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
        if index in (4, 6):
            prune.random_unstructured(layer, "weight", amount=0.3)
            prune.remove(layer, "weight")
        yield loss
