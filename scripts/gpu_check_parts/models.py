"""Models that the checks train: odd sizes, batch norm, late gradients, branches on two streams."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

INPUTS, OUTPUTS = 24, 10


class OddNet(nn.Module):
    """Sizes that divide by nothing, a scalar, an empty parameter, and parameters of the root itself."""

    def __init__(self, hidden: int = 61) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(3))
        self.last = nn.Linear(hidden, OUTPUTS)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x))) * self.scalar
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x) + self.empty.sum()


class ConvNet(nn.Module):
    """Channels-last convolutions with batch norm, whose buffers DDP broadcasts in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=(3, 1), padding=(1, 0))
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Conv2d(8, 8, kernel_size=3, padding=1)
        self.head = nn.Linear(8 * INPUTS, OUTPUTS)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, INPUTS // 4, 4).contiguous(memory_format=torch.channels_last)
        return self.head(torch.relu(self.mix(torch.relu(self.norm(self.conv(image))))).flatten(1))


class WideNet(nn.Module):
    """Large matrices, whose gradients come late: a leg that does not wait for them sends old ones."""

    def __init__(self, width: int, layers: int = 5) -> None:
        super().__init__()
        self.lift = nn.Linear(INPUTS, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for layer in self.layers:
            x = LateGradient.apply(torch.tanh(layer(x)))
        return self.head(x)


class BranchNet(nn.Module):
    """Two branches on two streams, ordered for their inputs and outputs as the rules of CUDA streams ask."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, OUTPUTS)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.branches
        if x.device.type != "cuda":
            return first(x) + second(x)
        here, side = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            y = second(x)
        z = first(x)
        here.wait_stream(side)
        for tensor, stream in ((x, side), (y, here)):
            tensor.record_stream(stream)
        return LateGradient.apply(z + y)


class SharedNet(nn.Module):
    """Both streams use the same parameters, the side stream without having waited for the other's use of them."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(INPUTS, width), nn.Linear(width, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cuda":
            return LateGradient.apply(self._branch(x) + self._branch(2 * x))
        here, side = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
        twice = 2 * x
        side.wait_stream(here)  # and not again
        y = self._branch(x)
        with torch.cuda.stream(side):
            z = self._branch(twice)
        here.wait_stream(side)
        for tensor, stream in ((twice, side), (z, here)):
            tensor.record_stream(stream)
        return LateGradient.apply(y + z)

    def _branch(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)))


class LateGradient(torch.autograd.Function):
    """Identity, in front of whose gradient the device sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        device_sleep(gradient.device)
        return gradient


def device_sleep(device: torch.device, cycles: int = 10_000_000) -> None:
    """Keep the current stream busy, by default for some 5 ms. Nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "odd": OddNet,
    "conv": ConvNet,
    "branches": BranchNet,
    "shared": SharedNet,
    "wide": lambda: WideNet(1024),
    "narrow": lambda: WideNet(48),
}
