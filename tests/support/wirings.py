"""Models that use their parameters in unusual places, orders or numbers; sizes as in models.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import HIDDEN, INPUTS, OUTPUTS


class TiedNet(nn.Module):
    """One weight as embedding at the start and as output head at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, HIDDEN)
        self.body = nn.Linear(HIDDEN, HIDDEN)
        self.unembed = nn.Linear(HIDDEN, HIDDEN)
        self.unembed.weight = self.body.weight
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.unembed(torch.tanh(self.body(self.embed(x)))))


class AttentionNet(nn.Module):
    """`MultiheadAttention.out_proj` never has its forward called; its weight is read by the
    attention itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(x.unsqueeze(-1))
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head(mixed.mean(1))


class TransformerNet(nn.Module):
    """PyTorch's own encoder: in eval mode without hooks it takes a fused path that reads the
    weights directly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 6)
        layer = nn.TransformerEncoderLayer(6, 2, 11, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(6, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x.unsqueeze(-1))).mean(1))


class BorrowedWeightNet(nn.Module):
    """A weight used through `F.linear`, so that the module that owns it is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(INPUTS, HIDDEN)
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(F.linear(x, self.owner.weight, self.owner.bias)))


class RootParameterNet(nn.Module):
    """Parameters of the root, used before, between and after its children (Megatron-LM #728)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((INPUTS,), 1.1))
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.shift = nn.ParameterList([nn.Parameter(torch.zeros(HIDDEN)) for _ in range(2)])
        self.second = nn.Linear(HIDDEN, OUTPUTS)
        self.gain = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x * self.scale) + self.shift[0] + self.shift[1])
        return self.second(hidden) * self.gain


class WeightNormNet(nn.Module):
    """A parametrization: `weight` is computed from two other parameters each time that it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(INPUTS, HIDDEN))
        self.second = nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, OUTPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class ReversedNet(nn.Module):
    """Registered in the opposite of the order of use, so arrival order is use order (Megatron-LM
    #950).
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(HIDDEN, OUTPUTS)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.first = nn.Linear(INPUTS, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class ShuffledNet(nn.Module):
    """Uses its layers in another order every time, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(4)])
        self.head = nn.Linear(HIDDEN, OUTPUTS)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in range(len(self.layers)):
            x = torch.tanh(self.layers[(index * 3 + self.calls) % len(self.layers)](x))
        self.calls += 1
        return self.head(x)


class TwiceNet(nn.Module):
    """One layer called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.again = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.again(self.first(x))))))


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
    """Activation checkpointing: the block runs again in backward, and so do the pre-hooks of its
    modules.
    """

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.block = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)
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
