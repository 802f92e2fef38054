"""Loops that write to parameters by themselves between `optimizer.step()` and the next forward, through
objects that they got hold of before anything was attached.

Whoever writes to a parameter must write to its updated value; the update must not come later and
overwrite or reorder what was written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from equivalence import Run, snapshot, train_step
from models import HIDDEN, INPUTS, OUTPUTS

LIMIT = 0.2


def clip_one_of_many(run: Run) -> Iterator[Any]:
    """Only one layer, so that the others stay pending meanwhile."""
    weight = run.model.module.second.weight
    for x, y in run.batches():
        loss = train_step(run, x, y)
        weight.data.clamp_(-LIMIT, LIMIT)
        yield loss


def step_post_hook(run: Run, writes: bool, after_attach: bool) -> Iterator[Any]:
    """A hook after `step` that reads every parameter, or writes to it."""
    seen: list[Any] = []

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if writes:
                    p.data.clamp_(-LIMIT, LIMIT)
        seen[:] = [] if writes else [snapshot(group["params"]) for group in optimizer.param_groups]

    if after_attach:
        run.attach()
    run.optimizer.register_step_post_hook(hook)
    for x, y in run.batches():
        loss = train_step(run, x, y)
        yield loss, list(seen)


def step_post_hook_of_all_optimizers(run: Run) -> Iterator[Any]:
    """The global kind, as profilers and loggers register it."""
    norms: list[Any] = []

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        norms[:] = [p.norm().item() for group in optimizer.param_groups for p in group["params"]]

    handle = register_optimizer_step_post_hook(hook)
    try:
        for x, y in run.batches():
            loss = train_step(run, x, y)
            yield loss, list(norms)
    finally:
        handle.remove()


class TemperatureNet(nn.Module):
    """CLIP in small: two towers, and a learned temperature that its loop keeps in range."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(INPUTS, HIDDEN)
        self.text = nn.Linear(INPUTS, HIDDEN)
        self.head = nn.Linear(HIDDEN, OUTPUTS)
        self.logit_scale = nn.Parameter(torch.tensor(0.69))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.tanh(self.image(x)) * torch.tanh(self.text(-x))
        return self.head(mixed * self.logit_scale.exp())


def clamp_the_temperature(run: Run) -> Iterator[Any]:
    """open_clip's `unwrap_model(model).logit_scale.clamp_(0, log(100))`, with a range that matters."""
    run.attach()
    model = run.model.module
    for x, y in run.batches():
        loss = train_step(run, x, y)
        model.logit_scale.data.clamp_(math.log(1.9), math.log(2))
        yield loss


def limit_norms_of_rows(run: Run) -> Iterator[Any]:
    """The max-norm constraint of dropout's authors."""
    matrices = [p for p in run.model.parameters() if p.dim() == 2 and p.numel()]
    for x, y in run.batches():
        loss = train_step(run, x, y)
        with torch.no_grad():
            for p in matrices:
                p.copy_(torch.renorm(p, p=2, dim=0, maxnorm=0.5))
        yield loss


def standardize_by_copy(run: Run) -> Iterator[Any]:
    """`copy_` in both directions: out into a buffer of the script's own, changed there, and back."""
    matrices = [p for p in run.model.parameters() if p.dim() == 2 and p.numel()]
    buffers = [torch.empty_like(p, requires_grad=False) for p in matrices]
    for x, y in run.batches():
        loss = train_step(run, x, y)
        with torch.no_grad():
            for p, buffer in zip(matrices, buffers, strict=True):
                buffer.copy_(p)
                buffer.sub_(buffer.mean(1, keepdim=True)).mul_(0.99)
                p.copy_(buffer)
        yield loss, snapshot(buffers)


def foreach_over_a_list(run: Run) -> Iterator[Any]:
    """The fused list operators, reading and writing."""
    parameters = [p for p in run.model.parameters() if p.numel()]
    for x, y in run.batches():
        loss = train_step(run, x, y)
        norms = torch._foreach_norm(parameters)
        with torch.no_grad():
            torch._foreach_mul_(parameters, 0.97)
            torch._foreach_clamp_max_(parameters, LIMIT)
        yield loss, snapshot(norms)


def through_numpy(run: Run) -> Iterator[Any]:
    """numpy shares the memory: it reads and writes without torch."""
    parameters = list(run.model.parameters())
    for x, y in run.batches():
        loss = train_step(run, x, y)
        sums = [float(p.detach().numpy().sum()) for p in parameters]
        for p in parameters:
            array = p.data.numpy()
            array *= 0.98
        yield loss, sums


def gradients_through_parameters(run: Run) -> Iterator[Any]:
    """`torch.autograd.grad` of a penalty, and of an output of the bare module, stepped by hand."""
    parameters = [p for p in run.model.parameters() if p.numel()]
    ones = torch.ones(2, INPUTS)
    for x, y in run.batches():
        loss = train_step(run, x, y)
        penalty = torch.stack([p.square().sum() for p in parameters]).sum()
        decay = torch.autograd.grad(penalty, parameters)
        slopes = torch.autograd.grad(run.model.module(ones).sum(), parameters)
        with torch.no_grad():
            for p, d, s in zip(parameters, decay, slopes, strict=True):
                p.sub_(0.01 * d + 0.01 * s)
        yield loss, penalty, snapshot(slopes)


def second_optimizer(run: Run, foreach: bool) -> Iterator[Any]:
    """An optimizer that nobody attached steps over the same parameters with the same gradients."""
    other = torch.optim.SGD(list(run.model.parameters()), lr=0.02, momentum=0.5, weight_decay=0.1, foreach=foreach)
    for x, y in run.batches():
        loss = train_step(run, x, y)
        other.step()
        yield loss


def broadcast_from_the_last_rank(run: Run) -> Iterator[Any]:
    """Each rank perturbs its parameters in its own way, then the last one's are sent to all."""
    parameters = [p for p in run.model.parameters() if p.numel()]
    source = dist.get_world_size() - 1
    for x, y in run.batches():
        loss = train_step(run, x, y)
        for p in parameters[::2]:
            p.data.mul_(1 - 0.01 * run.rank)
        for p in parameters:
            dist.broadcast(p.data, source)
        yield loss


def broadcast_parameters_themselves(run: Run) -> Iterator[Any]:
    """The same without `.data`: the parameter goes straight to the process group."""
    parameters = [p for p in run.model.parameters() if p.numel()]
    for x, y in run.batches():
        loss = train_step(run, x, y)
        with torch.no_grad():
            for p in parameters:
                dist.broadcast(p, 0)
            received = torch.zeros_like(parameters[0])
            gathered = [torch.zeros_like(received) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, parameters[0])
        yield loss, gathered


def average_over_ranks(run: Run) -> Iterator[Any]:
    """Local SGD's averaging, though there is nothing to average."""
    parameters = [p for p in run.model.parameters() if p.numel()]
    for x, y in run.batches():
        loss = train_step(run, x, y)
        for p in parameters:
            dist.all_reduce(p.data)
            p.data.div_(dist.get_world_size() + 0.01)
        yield loss
