"""Loops that write to parameters by themselves between `optimizer.step()` and the next forward, through
objects that they got hold of before anything was attached.

Whoever writes to a parameter must write to its updated value; the update must not come later and
overwrite or reorder what was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from comparison import snapshot
from equivalence import Run, plain_loop

LIMIT = 0.2


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
    for loss in plain_loop(run):
        yield loss, list(seen)


def step_post_hook_of_all_optimizers(run: Run) -> Iterator[Any]:
    """The global kind, as profilers and loggers register it."""
    norms: list[Any] = []

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        norms[:] = [p.norm().item() for group in optimizer.param_groups for p in group["params"]]

    handle = register_optimizer_step_post_hook(hook)
    try:
        for loss in plain_loop(run):
            yield loss, list(norms)
    finally:
        handle.remove()


def foreach_over_a_list(run: Run) -> Iterator[Any]:
    """The fused list operators, reading and writing."""
    parameters: list[torch.Tensor] = [p for p in run.model.parameters() if p.numel()]
    for loss in plain_loop(run):
        norms = torch._foreach_norm(parameters)
        with torch.no_grad():
            torch._foreach_mul_(parameters, 0.97)
            torch._foreach_clamp_max_(parameters, LIMIT)
        yield loss, snapshot(norms)


def through_numpy(run: Run) -> Iterator[Any]:
    """numpy shares the memory: it reads and writes without torch."""
    parameters = list(run.model.parameters())
    for loss in plain_loop(run):
        sums = [float(p.detach().numpy().sum()) for p in parameters]
        for p in parameters:
            array = p.data.numpy()
            array *= 0.98
        yield loss, sums


def second_optimizer(run: Run) -> Iterator[Any]:
    """An optimizer that nobody attached steps over the same parameters with the same gradients."""
    other = torch.optim.SGD(list(run.model.parameters()), lr=0.02, momentum=0.5, weight_decay=0.1, foreach=True)
    for loss in plain_loop(run):
        other.step()
        yield loss


def broadcast_parameters_themselves(run: Run) -> Iterator[Any]:
    """A parameter goes straight to the process group."""
    parameters = [p for p in run.model.parameters() if p.numel()]
    for loss in plain_loop(run):
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
    for loss in plain_loop(run):
        for p in parameters:
            dist.all_reduce(p.data)
            p.data.div_(dist.get_world_size() + 0.01)
        yield loss
