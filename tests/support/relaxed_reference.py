"""Relaxed training of several ranks in one process, written down as simply as it can be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import ddp_crossover as dx
from models import INPUTS, OUTPUTS, DeepNet

BATCH = 4


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return DeepNet().to(dtype)


def samples(step: int, rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The batch of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH, INPUTS, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randn(BATCH, OUTPUTS, generator=generator, dtype=torch.float64).to(dtype)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)  # type: ignore[arg-type]


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)  # type: ignore[arg-type]


def backward_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """The gradients of a rank's training step."""
    x, y = samples(step, rank, next(model.parameters()).dtype)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """One training step of a rank."""
    backward_of(model, optimizer, step, rank)
    optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def adasum(vectors: Sequence[Tensor]) -> Tensor:
    """Adasum by the tree of its definition: neighbours are combined, and so are their results."""
    vectors = list(vectors)
    while len(vectors) > 1:
        pairs = list(zip(vectors[::2], vectors[1::2], strict=False))
        rest = vectors[2 * len(pairs) :]
        vectors = [_adasum_of_two(one, other) for one, other in pairs] + rest
    return vectors[0]


def _adasum_of_two(one: Tensor, other: Tensor) -> Tensor:
    product = one @ other
    factors = [1.0 - product / (2.0 * (v @ v)) if v.any() else 1.0 for v in (one, other)]
    return factors[0] * one + factors[1] * other


def _rounds(groups: str | None, world_size: int) -> list[list[list[int]]]:
    """Who shares with whom, round after round."""
    if groups == "grid":
        rows = {4: 2, 6: 2, 8: 2}[world_size]
        columns = world_size // rows
        # Along the first dimension ranks are `columns` apart.
        return [
            [list(range(column, world_size, columns)) for column in range(columns)],
            [list(range(row * columns, (row + 1) * columns)) for row in range(rows)],
        ]
    if groups == "pairs":
        bits = [1 << bit for bit in reversed(range(int(math.log2(world_size))))]
        return [[[rank, rank | bit] for rank in range(world_size) if not rank & bit] for bit in bits]
    return [[list(range(world_size))]]


class GradientsChange:
    """The decisions of `SelSync`, from the gradients of all ranks."""

    def __init__(self, policy: dx.relaxed.SelSync, world_size: int) -> None:
        self.policy = policy
        self.averages: list[float | None] = [None] * world_size
        self.flag = True
        self.since = 0

    def __call__(self, done: int, nets: Sequence[nn.Module]) -> bool:
        flag_before = self.flag
        self.flag = False
        for rank, one in enumerate(nets):
            square = sum(float(p.grad.square().sum()) for p in one.parameters() if p.grad is not None)
            before = self.averages[rank]
            now = square if before is None else before * (1 - 1 / self.policy.window) + square / self.policy.window
            self.averages[rank] = now
            self.flag |= before is None or abs(now - before) / before >= self.policy.threshold
        self.since += 1
        is_due = flag_before or done <= self.policy.window or self.since >= self.policy.every
        self.since = 0 if is_due else self.since
        return is_due


def train_in_one_process(
    policy: dx.relaxed.LocalSGD,
    world_size: int,
    steps: int,
    optimizer: object = sgd,
    nodes: Sequence[Sequence[int]] | None = None,
    due_after: list[int] | None = None,
) -> list[Tensor]:
    """The parameters of all ranks at the beginning of the forward after the last step.

    Args:
        nodes: the ranks of each node, with `groups="node"`.
        due_after: gets the numbers of the steps after which ranks have shared.
    """
    nets = [net() for _ in range(world_size)]
    optimizers = [optimizer(one.parameters()) for one in nets]  # type: ignore[operator]
    shared = [[flat(nets[0]).clone() for _ in nets]]  # of each rank, and before each round
    velocity = torch.zeros_like(flat(nets[0]))
    rounds, means = _rounds(policy.groups, world_size), 0
    replicas = world_size if nodes is None else len(nodes)
    sent: list[Tensor] | None = None
    due = 0
    changes = GradientsChange(policy, world_size) if isinstance(policy, dx.relaxed.SelSync) else None
    for done in range(1, steps + 1):
        for rank in range(world_size):
            backward_of(nets[rank], optimizers[rank], done - 1, rank)
        is_due = done % policy.every == 0 if changes is None else changes(done, nets)
        for node in nodes or ():
            for of_ranks in zip(*(nets[rank].parameters() for rank in node), strict=True):
                mean = torch.stack([parameter.grad for parameter in of_ranks]).mean(dim=0)
                for parameter in of_ranks:
                    parameter.grad.copy_(mean)
        for rank in range(world_size):
            optimizers[rank].step()
        for now in ("merge", "send", "merge"):
            if now == "send" and is_due:
                sent, due = [flat(one) for one in nets], done + policy.delay
                if due_after is not None:
                    due_after.append(done)
            is_late = now == "merge" and sent is not None and (done >= due or (is_due and due < done + policy.delay))
            if not is_late:
                continue
            assert sent is not None
            base = shared[-1]
            for line in rounds[means % len(rounds)]:
                moves = [sent[rank] - base[rank] for rank in line]
                if policy.reduction == "adasum":
                    sizes = [p.numel() for p in nets[0].parameters()]
                    by_parameter = zip(*(move.split(sizes) for move in moves), strict=True)
                    mean = torch.cat([adasum(of_ranks) for of_ranks in by_parameter])
                else:
                    mean = torch.stack(moves).mean(dim=0)
                for rank in line:
                    if policy.groups in ("grid", "pairs"):
                        target = base[rank] + mean
                    elif isinstance(policy, dx.relaxed.DiLoCo):
                        if rank == 0:
                            velocity = policy.outer_momentum * velocity + mean
                        target = base[rank] + policy.outer_lr * (mean + policy.outer_momentum * velocity)
                        base[rank] = target
                    else:
                        target = base[rank] = base[rank] + mean
                    x = flat(nets[rank])
                    if policy.merge == "daso" and policy.delay:
                        merged = (2 * policy.delay * x + replicas * target) / (2 * policy.delay + replicas)
                    else:
                        merged = target + (x - sent[rank])
                    nn.utils.vector_to_parameters(merged, nets[rank].parameters())
            sent = None
            means += 1
    return [flat(one) for one in nets]
