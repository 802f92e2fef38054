"""Loops whose ranks have batches of different sizes, and the same training by one process on all samples."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from equivalence import SMALL_GROUPS_MB
from models import INPUTS, OUTPUTS, DeepNet

STEPS = 8
SAMPLES = 12
SEED = 5


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD in which every gradient has an effect on later steps."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True)
class Weighted:
    """What is trained, and how."""

    loop: Callable[[WeightedRun], None]
    model: Callable[[], nn.Module] = DeepNet
    dtype: torch.dtype = torch.float64
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    ddp: Mapping[str, Any] = field(default_factory=dict)
    dear: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float | None = None
    """Only where gradients are rounded on the wire."""
    split: str = "random"
    """How samples are shared: "random", "zeros" (some ranks have none), "equal", "one" (one rank has all)."""


def counts_of(step: int, world_size: int, split: str) -> list[int]:
    """How many of the samples of a step each rank has."""
    draw = random.Random(1000 * step + world_size)
    if split == "equal":
        return [SAMPLES // world_size] * world_size
    if split == "one":
        return [SAMPLES if rank == step % world_size else 0 for rank in range(world_size)]
    least = 0 if split == "zeros" else 1
    cuts = sorted(draw.randint(0, SAMPLES - least * world_size) for _ in range(world_size - 1))
    bounds = [0, *cuts, SAMPLES - least * world_size]
    counts = [high - low + least for low, high in itertools.pairwise(bounds)]
    if split == "zeros" and step % 2:
        counts[0], counts[-1] = 0, counts[0] + counts[-1]
    return counts


def samples_of(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All samples of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, INPUTS, generator=generator).to(dtype)
    return x, torch.randn(SAMPLES, OUTPUTS, generator=generator).to(dtype)


class WeightedRun:
    """A training script on one rank, or, with ``state=None``, on all samples in one process."""

    def __init__(self, case: Weighted, *, on_ranks: bool) -> None:
        torch.manual_seed(SEED)
        self.case = case
        net = case.model().to(case.dtype)
        self.rank = dist.get_rank() if on_ranks else 0
        self.world_size = dist.get_world_size()
        self.net = net
        ddp = DistributedDataParallel(net, **case.ddp) if on_ranks else None
        self.model: Any = ddp or net
        self.optimizer = case.optimizer(self.model.parameters())
        self.state: Any = None
        if ddp is not None:
            options: dict[str, Any] = {"fusion_mb": SMALL_GROUPS_MB, "strict": True, "weighted": True} | dict(case.dear)
            self.state = dx.attach(ddp, self.optimizer, **options)

    def steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's samples of each step."""
        for step in range(STEPS):
            yield self.samples(step)

    def samples(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's samples of a step."""
        x, y = samples_of(step, self.case.dtype)
        if self.state is None:
            return x, y
        counts = counts_of(step, self.world_size, self.case.split)
        low = sum(counts[: self.rank])
        return x[low : low + counts[self.rank]], y[low : low + counts[self.rank]]

    def batch(self, count: int) -> contextlib.AbstractContextManager[Any]:
        """``state.batch(count)``."""
        return contextlib.nullcontext() if self.state is None else self.state.batch(count)

    def no_sync(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """``no_sync()`` but for the last micro-batch."""
        return contextlib.nullcontext() if self.state is None or is_last else self.model.no_sync()

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean over samples, and over their outputs."""
        return nn.functional.mse_loss(output, y)


def train_both(case: Weighted) -> None:
    """Train on ranks and in one process; all parameters must be the same, and so must they be on all ranks."""
    run, alone = WeightedRun(case, on_ranks=True), WeightedRun(case, on_ranks=False)
    case.loop(run)
    case.loop(alone)
    tolerance = case.tolerance or (1e-12 if case.dtype is torch.float64 else 1e-6)
    ours = {name: p.detach().clone() for name, p in run.net.named_parameters()}
    for name, other in alone.net.named_parameters():
        torch.testing.assert_close(
            ours[name], other.detach(), rtol=tolerance, atol=tolerance, msg=partial("{}: {}".format, name)
        )
    for name, parameter in ours.items():
        of_first = parameter.clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(of_first, parameter), f"{name} differs between ranks"
    stats = run.state.stats()
    if "schedule" not in case.dear:
        assert stats.pipelined_iterations >= STEPS // 2, stats
    run.state.detach()


# Loops.


def plain(run: WeightedRun) -> None:
    """The loop of every tutorial."""
    for x, y in run.steps():
        run.optimizer.zero_grad()
        with run.batch(len(x)):
            if len(x):
                run.loss(run.model(x), y).backward()
        run.optimizer.step()


def empty_batches(run: WeightedRun) -> None:
    """A rank without samples runs forward and backward with none, and its loss is NaN."""
    for x, y in run.steps():
        run.optimizer.zero_grad()
        with run.batch(len(x)):
            run.loss(run.model(x), y).backward()
        run.optimizer.step()


def dummy_batches(run: WeightedRun) -> None:
    """A rank without samples runs forward and backward with another one."""
    for x, y in run.steps():
        run.optimizer.zero_grad()
        with run.batch(len(x)):
            if not len(x):
                x, y = torch.ones(1, INPUTS, dtype=x.dtype), torch.ones(1, OUTPUTS, dtype=y.dtype)
            run.loss(run.model(x), y).backward()
        run.optimizer.step()


def clipped(run: WeightedRun) -> None:
    """Gradients are clipped, by torch's function and by our own."""
    for step, (x, y) in enumerate(run.steps()):
        run.optimizer.zero_grad()
        with run.batch(len(x)):
            if len(x):
                run.loss(run.model(x), y).backward()
        if run.state is not None and step % 2:
            run.state.clip_grad_norm_(0.05)
        else:
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
        run.optimizer.step()


def scaled(run: WeightedRun) -> None:
    """The loss is scaled, and one rank alone overflows in one step, which is skipped."""
    scaler = (torch.amp.GradScaler if run.state is None else dx.GradScaler)("cpu", init_scale=8.0, growth_interval=3)
    for step, (x, y) in enumerate(run.steps()):
        run.optimizer.zero_grad()
        with run.batch(len(x)):
            loss = run.loss(run.model(x), y)
            if step == 6 and run.rank == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()


def two_losses(run: WeightedRun) -> None:
    """Two forwards and two reduced backwards in one batch."""
    for x, y in run.steps():
        run.optimizer.zero_grad()
        with run.batch(len(x)):
            run.loss(run.model(x), y).backward()
            run.loss(run.model(2 * x), y).backward()
        run.optimizer.step()
