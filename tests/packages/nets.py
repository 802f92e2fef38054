"""A model with parameters of all shapes that optimizers treat differently, and its data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 4
TOKENS, WORDS, EDGE = 5, 50, 8


class Shapes(nn.Module):
    """An embedding, a convolution, norms, a scalar, matrices with edges below and above 16, two of them alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 24)
        self.conv = nn.Conv2d(3, 6, 3)
        self.into = nn.Linear(24, 40)
        self.norm = nn.LayerNorm(40)
        self.wide = nn.Linear(40, 110)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.square = nn.Linear(110, 82)
        self.back = nn.Linear(82, 40, bias=False)
        self.alike = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)])
        self.dropout = nn.Dropout(0.1)  # shows draws in another order
        self.out = nn.Linear(40, 3)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        """Shapes (B, TOKENS) and (B, 3, EDGE, EDGE) to (B, 3)."""
        seen = F.avg_pool2d(torch.tanh(self.conv(image)), 3).flatten(1)  # 6 x 2 x 2
        hidden = self.norm(self.into(self.embedding(tokens).mean(1) + seen))
        hidden = self.back(torch.tanh(self.square(F.gelu(self.wide(hidden)) * self.scale)))
        for layer in self.alike:
            hidden = hidden + self.dropout(torch.tanh(layer(hidden)))
        return self.out(hidden)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The batch of a rank in a step, always the same."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(WORDS, (BATCH, TOKENS), generator=draw)
    image = torch.randn(BATCH, 3, EDGE, EDGE, generator=draw)
    return tokens, image, torch.randn(BATCH, 3, generator=draw)
