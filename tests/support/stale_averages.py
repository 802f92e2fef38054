"""Averages of other packages, and steps around the step: each keeps a list of parameters of its own and reads or
writes them right after `step()`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import loralib
import torch
from torch import nn

from comparison import snapshot
from equivalence import Run, plain_loop
from models import HIDDEN, INPUTS, OUTPUTS

DECAY = 0.9


def average_of_torch_ema(run: Run) -> Iterator[Any]:
    """Holds weak references to the parameters; evaluates with the averages in their place."""
    from torch_ema import ExponentialMovingAverage  # takes a while, and few tests need it

    average = ExponentialMovingAverage(run.model.parameters(), decay=DECAY)
    x_eval, _ = run.batch(10_000)
    for index, loss in enumerate(plain_loop(run)):
        average.update()
        output = None
        if index % 4 == 3:
            with average.average_parameters(), torch.no_grad():
                output = run.model(x_eval)
        yield loss, output, snapshot(average.shadow_params)


def average_of_ema_pytorch(run: Run) -> Iterator[Any]:
    """A module that holds the trained module."""
    from ema_pytorch import EMA

    average = EMA(run.model.module, beta=DECAY, update_after_step=2, update_every=1)
    for loss in plain_loop(run):
        average.update()
        yield loss, snapshot(average.ema_model.state_dict())


def average_of_timm(run: Run, version: int) -> Iterator[Any]:
    """Pairs the values of two state dicts."""
    from timm.utils import ModelEmaV2, ModelEmaV3

    average = (ModelEmaV2 if version == 2 else ModelEmaV3)(run.model.module, decay=DECAY)
    for loss in plain_loop(run):
        average.update(run.model.module)
        yield loss, snapshot(average.module.state_dict())


class LoraNet(nn.Module):
    """loralib's layers: `eval()` adds the product of two trained matrices to a frozen weight, `train()`
    subtracts it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = loralib.Linear(INPUTS, HIDDEN, r=2)
        self.second = loralib.Linear(HIDDEN, OUTPUTS, r=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def evaluate_every_third_step(run: Run) -> Iterator[Any]:
    """`eval()` right after the step, which merges weights in `LoraNet`."""
    x_eval, _ = run.batch(10_000)
    for index, loss in enumerate(plain_loop(run)):
        output = None
        if index % 3 == 2:
            run.model.eval()
            with torch.no_grad():
                output = run.model(x_eval)
            run.model.train()
        yield loss, output


def sharpness_aware(run: Run, replaces_data: bool) -> Iterator[Any]:
    """SAM: the gradient at perturbed weights is applied to the weights as they were. Two implementations
    are in use: one subtracts the perturbation, one puts the old tensor back with `p.data = old`.
    """
    parameters = list(run.model.parameters())
    for x, y in run.batches():
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        perturbations = _perturbations(parameters)
        before = [p.data.clone() for p in parameters]
        with torch.no_grad():
            for p, perturbation in zip(parameters, perturbations, strict=True):
                p.add_(perturbation)
        run.optimizer.zero_grad()
        run.loss(run.model(x), y).backward()
        with torch.no_grad():
            for p, perturbation, old in zip(parameters, perturbations, before, strict=True):
                if replaces_data:
                    p.data = old
                else:
                    p.sub_(perturbation)
        run.optimizer.step()
        yield loss, snapshot(parameters)


def _perturbations(parameters: Sequence[Any], radius: float = 0.05) -> list[torch.Tensor]:
    gradients = [p.grad for p in parameters]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    return [g * (radius / norm) for g in gradients]


class MomentumEncoderNet(nn.Module):
    """MoCo: at the start of each forward a second encoder follows the trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.pairs = list(zip(self.query.parameters(), self.key.parameters(), strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for query, key in self.pairs:
                key.data = key.data * DECAY + query.data * (1 - DECAY)
            keys = self.key(x)
        return self.query(x) - 0.1 * keys
