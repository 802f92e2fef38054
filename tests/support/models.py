"""Small models, each odd in one way that a gradient pipeline may stumble over. All map (N, 7)
floats to (N, 5).

Sizes are primes or nearly so: nothing divides by the world sizes 2, 3 and 4, and with the tests'
fusion groups of 100 bytes most weights are larger than a group while several biases share one.
"""

from __future__ import annotations

import torch
from torch import nn

INPUTS = 7
HIDDEN = 13
OUTPUTS = 5


class OddNet(nn.Module):
    """Linear, norm, linear, and parameters with no, one and zero dimensions-or-elements used by the
    root itself.
    """

    def __init__(self, empty_parameter: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.second = nn.Linear(HIDDEN, OUTPUTS)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.single = nn.Parameter(torch.tensor([0.3]))
        self.empty = nn.Parameter(torch.zeros(0 if empty_parameter else 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x))) * self.scalar
        return self.second(hidden) + self.single + self.empty.sum()


class MatrixNet(nn.Module):
    """Only 2-D parameters, for optimizers that orthogonalize them (Muon)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN, bias=False)
        self.middle = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.second = nn.Linear(HIDDEN, OUTPUTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class DeepNet(nn.Sequential):
    """Enough layers that the pipeline has many groups in flight at once."""

    def __init__(self, bias: bool = True) -> None:
        layers: list[nn.Module] = [nn.Linear(INPUTS, HIDDEN, bias)]
        for _ in range(6):
            layers += [nn.Tanh(), nn.Linear(HIDDEN, HIDDEN, bias)]
        super().__init__(*layers, nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS, bias))


class DropoutNet(nn.Module):
    """Draws random numbers in forward: whatever draws one more shifts the whole run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = OddNet()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.dropout(x))


class BatchNormNet(nn.Module):
    """Convolution and batch norm: buffers that DDP broadcasts and that every train-mode forward
    changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, kernel_size=3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3 * 5, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x.unsqueeze(1)))).flatten(1))


class ChannelsLastNet(nn.Module):
    """Convolution weights with permuted strides; DDP gives their gradients the same strides."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, 3, kernel_size=1)
        self.conv = nn.Conv2d(3, 5, kernel_size=(1, 3))
        self.head = nn.Linear(5 * 5, OUTPUTS)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(-1, 1, 1, INPUTS).contiguous(memory_format=torch.channels_last)
        return self.head(torch.relu(self.conv(self.lift(image))).flatten(1))


class FrozenNet(OddNet):
    """The first layer is frozen, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class MixedDtypeNet(nn.Module):
    """Linear layers in one dtype, norms in fp32: one bucket per dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first = nn.Linear(INPUTS, HIDDEN, dtype=dtype)
        self.norm = nn.LayerNorm(HIDDEN)
        self.second = nn.Linear(HIDDEN, OUTPUTS, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x.to(self.dtype)).float()))
        return self.second(hidden.to(self.dtype)).float()


class OneDtypeNet(nn.Module):
    """`OddNet` in a single dtype other than fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.net = OddNet().to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.to(self.dtype)).float()


class WideNet(nn.Sequential):
    """1.3 MiB: enough for groups of several sizes."""

    def __init__(self) -> None:
        layers = [nn.Linear(INPUTS, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh()]
        super().__init__(*layers, nn.Linear(400, OUTPUTS))
