"""Relaxed training of several ranks in one process, written down as simply as it can be."""

from __future__ import annotations

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


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """One training step of a rank."""
    x, y = samples(step, rank, next(model.parameters()).dtype)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def train_in_one_process(
    policy: dx.relaxed.LocalSGD, world_size: int, steps: int, optimizer: object = sgd
) -> list[Tensor]:
    """The parameters of all ranks at the beginning of the forward after the last step."""
    nets = [net() for _ in range(world_size)]
    optimizers = [optimizer(one.parameters()) for one in nets]  # type: ignore[operator]
    shared, velocity = flat(nets[0]), torch.zeros_like(flat(nets[0]))
    sent: list[Tensor] | None = None
    due = 0
    for done in range(1, steps + 1):
        for rank in range(world_size):
            step_of(nets[rank], optimizers[rank], done - 1, rank)
        for now in ("merge", "send", "merge"):
            if now == "send" and done % policy.every == 0:
                sent, due = [flat(one) for one in nets], done + policy.delay
            if now == "merge" and sent is not None and done >= due:
                mean = torch.stack(sent).mean(dim=0) - shared
                if isinstance(policy, dx.relaxed.DiLoCo):
                    velocity = policy.outer_momentum * velocity + mean
                    shared = shared + policy.outer_lr * (mean + policy.outer_momentum * velocity)
                else:
                    shared = shared + mean
                for one, own in zip(nets, sent, strict=True):
                    nn.utils.vector_to_parameters(shared + (flat(one) - own), one.parameters())
                sent = None
    return [flat(one) for one in nets]
