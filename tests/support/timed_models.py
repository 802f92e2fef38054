"""Models whose layers take a given time on a virtual device, and little on the CPU that computes them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fake_streams import Gpu


class LayerSize(NamedTuple):
    """One layer: its parameters, and seconds of its forward and backward."""

    numel: int
    forward_s: float
    backward_s: float


def uniform(layers: int = 16) -> list[LayerSize]:
    """All layers alike."""
    return [LayerSize(200_000, 1e-3, 2e-3)] * layers


def convolutional(layers: int = 24) -> list[LayerSize]:
    """Early layers compute for long and have few parameters, late ones the other way round."""
    shares = [(layer + 1) / layers for layer in range(layers)]
    return [LayerSize(int(400_000 * share**3) + 500, 2e-3 * (1.1 - share), 4e-3 * (1.1 - share)) for share in shares]


def heavy_ends(layers: int = 16) -> list[LayerSize]:
    """An embedding and a head with a third of all parameters each."""
    end = LayerSize(800_000, 1e-3, 2e-3)
    return [end, *[LayerSize(100_000, 1.5e-3, 3e-3)] * layers, end]


SHAPES = {"uniform": uniform, "convolutional": convolutional, "heavy_ends": heavy_ends}


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: TimedLayer) -> Tensor:
        ctx.layer, ctx.like = layer, torch.empty_like(weight, device="meta")
        layer.compute(layer.size.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer = ctx.layer
        layer.compute(layer.size.backward_s)
        return grad, torch.full_like(ctx.like, 1e-3, device="cpu"), None


class TimedLayer(nn.Module):
    """Takes its time, each time a little more or less than usual: by `noise`, as a fraction."""

    def __init__(self, gpu: Gpu, size: LayerSize, noise: float, seed: int) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.full((size.numel,), 0.5))
        self._gpu = gpu
        self._noise = noise
        self._random = random.Random(seed)

    def compute(self, seconds: float) -> None:
        self._gpu.compute(seconds * math.exp(self._noise * self._random.gauss(0, 1)))

    def forward(self, x: Tensor) -> Tensor:
        # Reading one element is the first use of the parameter, as a kernel's would be.
        return _Takes.apply(x + 0 * self.weight[0].detach(), self.weight, self)


def timed_model(gpu: Gpu, sizes: Sequence[LayerSize], noise: float, rank: int) -> nn.Sequential:
    """These layers, on a virtual device."""
    return nn.Sequential(*(TimedLayer(gpu, size, noise, 1000 * rank + index) for index, size in enumerate(sizes)))
