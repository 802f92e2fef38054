"""Attaches to every DDP model of this process at its first training forward, for tests that know nothing of us."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import ddp_crossover as dx
from ddp_crossover.torch_internals.ddp import has_comm_hook

_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_seen: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
not_attached: list[str] = []
attached: list[str] = []


def _optimizers_of(ddp: DistributedDataParallel) -> list[Optimizer]:
    own = {id(parameter) for parameter in ddp.parameters()}
    found = [
        optimizer
        for optimizer in _optimizers
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    ]
    if found:
        return found
    # A test that steps nothing, or makes its optimizer later: attach wants one, and this one is never stepped.
    return [torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.0)]


def _attach(ddp: DistributedDataParallel) -> None:
    _seen.add(ddp)
    if has_comm_hook(ddp):
        not_attached.append("has a communication hook of its own")
        return
    if dist.get_backend(ddp.process_group) != "gloo":
        not_attached.append("is not on gloo")
        return
    dx.attach(ddp, _optimizers_of(ddp))
    attached.append(type(ddp.module).__name__)


def attach_everywhere() -> None:
    """Attach to every DDP model that is trained from now on."""
    make_optimizer = Optimizer.__init__

    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        make_optimizer(self, *args, **kwargs)
        _optimizers.add(self)

    def call(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and self not in _seen:
            _attach(self)
        return nn.Module.__call__(self, *args, **kwargs)

    Optimizer.__init__ = init  # type: ignore[method-assign]
    DistributedDataParallel.__call__ = call  # type: ignore[method-assign]
