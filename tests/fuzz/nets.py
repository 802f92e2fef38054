"""Models of programs; all map (N, 7) to (N, 5), as those of `tests/support/models.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from models import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    BatchNormNet,
    ChannelsLastNet,
    DeepNet,
    DropoutNet,
    FrozenNet,
    MatrixNet,
    MixedDtypeNet,
    OddNet,
)


class Branched(nn.Module):
    """Leaves its middle layer out in two of three forwards, or, told so, on all ranks but the first."""

    def __init__(self, by_rank: bool = False) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, OUTPUTS)
        self.never = nn.Parameter(torch.ones(3))
        self.by_rank, self.forwards = by_rank, 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        is_used = torch.distributed.get_rank() == 0 if self.by_rank else self.forwards % 3 == 0
        self.forwards += self.training
        return self.last(hidden + self.middle(hidden) if is_used else hidden)


class Tied(nn.Module):
    """Uses one weight twice, and an embedding whose weight is that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.layer = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, OUTPUTS)
        self.words = nn.Embedding(OUTPUTS, HIDDEN)
        self.words.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(torch.tanh(self.layer(self.into(x)))))
        return self.head(hidden + self.words((x[:, 0] > 0).long()))


class Checkpointed(nn.Module):
    """Computes a part of its forward again in backward, and draws the same random numbers there."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(DeepNet())
        self.first, self.middle, self.last = (
            nn.Sequential(*part) for part in (layers[:5], [*layers[5:9], nn.Dropout(0.2)], layers[9:])
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=False))


class Recurrent(nn.Module):
    """Uses each weight in every time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(1, HIDDEN, batch_first=True), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.unsqueeze(2))[0][:, -1])


class Attending(nn.Module):
    """A transformer block; takes torch's fast path in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(1, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.into(x.unsqueeze(2))).mean(1))


class Wired(nn.Module):
    """Registered against the order of use, which changes; parameters of the root itself, a weight whose module is never
    called, and one that is computed from two parameters (Megatron-LM #728 and #950).
    """

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.head = nn.Linear(HIDDEN, OUTPUTS)
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(3)])
        self.normed = weight_norm(nn.Linear(HIDDEN, HIDDEN))
        self.owner = nn.Linear(INPUTS, HIDDEN)
        self.scale = nn.Parameter(torch.full((INPUTS,), 1.1))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(nn.functional.linear(x * self.scale, self.owner.weight, self.owner.bias))
        for index in range(3):
            hidden = torch.tanh(self.layers[(index + self.forwards) % 3](hidden))
        self.forwards += self.training
        return self.head(self.normed(hidden)) * self.gain


NETS: dict[str, Callable[[], nn.Module]] = {
    "odd": OddNet,
    "deep": DeepNet,
    "matrices": MatrixNet,
    "batch_norm": BatchNormNet,
    "dropout": DropoutNet,
    "channels_last": ChannelsLastNet,
    "frozen": FrozenNet,
    "branched": Branched,
    "by_rank": lambda: Branched(by_rank=True),
    "tied": Tied,
    "checkpointed": Checkpointed,
    "recurrent": Recurrent,
    "attending": Attending,
    "wired": Wired,
    "mixed": lambda: MixedDtypeNet(torch.bfloat16),
}
