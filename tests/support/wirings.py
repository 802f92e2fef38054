"""Models that use their parameters in unusual places, orders or numbers; sizes as in models.py."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import HIDDEN, INPUTS, OUTPUTS


class SkippingNet(nn.Module):
    """Skips one of its layers in turn; needs `find_unused_parameters`. `apart` makes ranks skip
    different ones.
    """

    def __init__(self, apart: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN, bias)
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN, bias) for _ in range(3)])
        self.never_used = nn.Linear(3, 3, bias)
        self.head = nn.Linear(HIDDEN, OUTPUTS, bias)
        self.calls = torch.distributed.get_rank() if apart else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index, layer in enumerate(self.layers):
            if index != self.calls % 3:
                x = torch.tanh(layer(x))
        self.calls += 1
        return self.head(x)


class CheckpointNet(nn.Module):
    """Reentrant activation checkpointing: a backward of its own inside of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.block = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.block, self.first(x), use_reentrant=True)
        return self.head(hidden)


class HalfUsedNet(nn.Module):
    """A layer that no forward ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.never_used = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x)))
