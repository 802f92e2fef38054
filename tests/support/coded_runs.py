"""Real ranks that train with coded gradients, beside `wire_reference.OneProcess`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.addons.codes import wire as codecs
from equivalence import Factory, optimizer
from models import INPUTS, OUTPUTS
from node_groups import on_nodes
from wire_reference import OneProcess, Wire

SGD = optimizer(torch.optim.SGD, lr=0.1, weight_decay=0.01)
MOMENTUM_SGD = optimizer(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
ADAM = optimizer(torch.optim.Adam, lr=0.01)
# About 8000 elements as 8-bit integers: the middle layer of `CodedNet` is cut.
GROUPS_MB = 8000 / 2**20


class CodedNet(nn.Module):
    """Slices with several blocks and chunks, and parameters whose gradients are not coded."""

    def __init__(self, hidden: int = 110) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, OUTPUTS)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x))) * self.gain
        return self.last(torch.tanh(self.middle(hidden)))


@dataclass(frozen=True)
class Coded:
    """A run with codes.

    Attributes:
        options: of ``dx.attach``.
        nodes: the ranks of each node, for ``groups="node"``.
        looks: whether the script reads ``.grad`` and the parameters in every step.
        feedback: whether what codes leave out is made up for later.
    """

    options: Mapping[str, Any]
    optimizer: Factory = SGD
    model: Callable[[], nn.Module] = CodedNet
    steps: int = 9
    nodes: tuple[tuple[int, ...], ...] = ()
    looks: bool = True
    feedback: bool = True
    ddp: Mapping[str, Any] = field(default_factory=dict)

    def wire(self) -> Wire:
        """The same for the reference."""
        top_k: dx.TopK | None = self.options.get("compress")
        return Wire(
            dtype=self.options.get("wire_dtype"),
            density=None if top_k is None else partial(density_at, tuple(top_k.warmup), top_k.density),
            selector="auto" if top_k is None else top_k.selector,
            feedback=self.feedback,
            nodes=self.nodes,
        )


def density_at(warmup: tuple[tuple[int, float], ...], density: float, step: int) -> float:
    """That of a step."""
    schedule = [one for steps, one in warmup for _ in range(steps)]
    return schedule[step] if step < len(schedule) else density


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's batch in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    size = 3 + rank
    return torch.randn(size, INPUTS, generator=generator), torch.randn(size, OUTPUTS, generator=generator)


def loss_of(step: int, rank: int, model: nn.Module) -> Tensor:
    """A rank's loss in a step."""
    x, y = batch(step, rank)
    return nn.functional.mse_loss(model(x).float(), y)


class Training:
    """A rank of a run."""

    def __init__(self, case: Coded) -> None:
        self.case = case
        torch.manual_seed(20)
        network = case.model()
        self.at_start = copy.deepcopy(network)
        self.model = DistributedDataParallel(network, **case.ddp)
        optimizer = case.optimizer(self.model.module)
        assert isinstance(optimizer, torch.optim.Optimizer)
        self.optimizer = optimizer
        with (
            on_nodes(case.nodes) if case.nodes else nullcontext(),
            mock.patch.object(codecs.CodedWire, "has_feedback", case.feedback),
        ):
            self.state = dx.attach(self.model, self.optimizer, **({"fusion_mb": GROUPS_MB} | dict(case.options)))

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss_of(step, dist.get_rank(), self.model).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.module.named_parameters()}

    def left_out(self) -> dict[str, Any]:
        return self.state.state_dict()

    def reference(self) -> OneProcess:
        return OneProcess(self.at_start, self.case.optimizer, self.case.wire(), dist.get_world_size())


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Also of zeros and NaN; but for the sign of zeros, which sparse sums lose."""
    return torch.equal((left + 0.0).nan_to_num(12345.0), (right + 0.0).nan_to_num(12345.0))


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor], where: str) -> None:
    assert left.keys() == right.keys(), (where, left.keys() ^ right.keys())
    for name in left:
        difference = (left[name].double() - right[name].double()).abs().max() if left[name].numel() else 0
        assert same_bits(left[name], right[name]), f"{where}: {name} differs by {float(difference)}"


def compare_with_one_process(case: Coded) -> None:
    """Train, and train in one process."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = Training(case)
    plans, seen = [], []
    for step in range(case.steps):
        run.backward(step)
        plans.append(run.state.plan)
        run.optimizer.step()
        if case.looks:
            seen.append(run.parameters())
    seen.append(run.parameters())
    everyones = everywhere(seen)
    for other, theirs in enumerate(everyones):
        for step, parameters in enumerate(theirs):
            assert_same(seen[step], parameters, f"ranks {rank} and {other} in step {step}")
    plan = run.state.plan
    assert plan is not None and plan.is_coded
    all_left_out = everywhere(run.left_out())
    if rank == 0:
        reference = run.reference()
        for step in range(case.steps):
            reference.step([partial(loss_of, step, one) for one in range(world_size)], plans[step])
            if case.looks:
                assert_same(seen[step], reference.parameters(), f"step {step} of one process")
        assert_same(seen[-1], reference.parameters(), "one process at the end")
        for one in range(world_size):
            assert all_left_out[one]["steps"] == reference.ranks.steps
            if case.wire().feedback:
                assert_same(all_left_out[one]["residual"], reference.ranks.residual[one], f"residual of rank {one}")
            else:
                assert not all_left_out[one]["residual"]
    run.state.detach()
