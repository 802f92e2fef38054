"""A small script of which some steps have gradients that DDP does not reduce, and such steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import ddp_crossover as dx
from equivalence import SMALL_GROUPS_MB

STEPS = 11
IN_PIPELINE = 7
WIDTH = 6


class Script:
    """A model with a loss of ordinary size on each rank's own data.

    Args:
        ddp: arguments of DDP.
        dear: options of `attach`; None: plain DDP.
        ignored: names of parameters that DDP is told to ignore.
    """

    def __init__(
        self, dear: dict[str, Any] | None, ddp: dict[str, Any] | None = None, *, ignored: Sequence[str] = ()
    ) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.net, list(ignored))
        self.model = DistributedDataParallel(self.net, **(ddp or {}))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.state: dx.DearState | None = None
        if dear is not None:
            sizes: dict[str, Any] = {} if dear.get("schedule") == "allreduce" else {"fusion_mb": SMALL_GROUPS_MB}
            self.state = dx.attach(self.model, self.optimizer, **sizes | dear)
        self._weighs = bool(dear and dear.get("weighted"))

    def x(self, step: int) -> Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))

    def batch(self) -> contextlib.AbstractContextManager[Any]:
        return self.state.batch(4) if self.state is not None and self._weighs else contextlib.nullcontext()

    def backward(self, step: int) -> None:
        with self.batch():
            self.model(self.x(step)).pow(2).mean().backward()

    def average(self) -> None:
        """What a script does that averages gradients by itself."""
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def train(self, unusual: Step | None = None, first: int = 0) -> None:
        """Make all steps, those from `first` on in an unusual way."""
        for step in range(STEPS):
            self.optimizer.zero_grad()
            if unusual is not None and step >= first:
                unusual(self, step)
            else:
                self.backward(step)
            self.optimizer.step()


Step = Callable[[Script, int], None]


def past_ddp(script: Script, step: int) -> None:
    with script.batch():
        script.model.module(script.x(step)).pow(2).mean().backward()


def second_backward(script: Script, step: int) -> None:
    """Two backwards of one forward, as with a gradient penalty, of which DDP reduces one."""
    x = script.x(step).requires_grad_()
    with script.batch():
        output = script.model(x)
        output.pow(2).mean().backward(retain_graph=True)
        [gradient] = torch.autograd.grad(output.sum(), x, create_graph=True)
        gradient.pow(2).mean().backward()


def second_backward_alone(script: Script, step: int) -> None:
    """The gradients that DDP has reduced are dropped, and those of the second backward are in new tensors."""
    with script.batch():
        output = script.model(script.x(step))
        output.pow(2).mean().backward(retain_graph=True)
        script.optimizer.zero_grad()
        output.abs().mean().backward()


def alone_on_purpose(script: Script, step: int) -> None:
    with script.model.no_sync():
        script.backward(step)


def averaged_after_no_sync(script: Script, step: int) -> None:
    alone_on_purpose(script, step)
    script.average()


def stepped_in_hook(script: Script, step: int) -> None:
    """An update behind the gradient that comes last, as memory is saved with an optimizer for each parameter."""

    def optimize(_: Tensor) -> None:
        script.optimizer.step()
        script.optimizer.zero_grad()

    handle = next(script.net.parameters()).register_post_accumulate_grad_hook(optimize)
    script.backward(step)
    handle.remove()


class _Negative(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return -weight


def parametrized(script: Script, step: int) -> None:
    """DDP has its hook on an accumulator of gradients that the parameter no longer has."""
    if not parametrize.is_parametrized(script.net[0]):
        parametrize.register_parametrization(script.net[0], "weight", _Negative())
    script.backward(step)
