"""Paced layers: their compute sleeps. They stand in for an accelerator whose work takes no processor time.

A layer needs its weight at the start of its forward, which takes F, and has its weight's gradient at the end of its
backward, which takes 2F. All layers take equally long. Sleeping frees the core and the GIL for communication.
"""

import ctypes
import itertools
import time
from typing import Any

import torch
from torch import Tensor, nn

COLUMNS = 500
# How parameters grow from one quarter of the network to the next. 3.24 puts 2, 7, 22 and 70% into the quarters;
# ResNet-50's four stages, which compute about equally long, hold 1, 5, 28 and 67%.
GROWTH = {"uniform": 1.0, "heavy-end": 3.24}
_PR_SET_TIMERSLACK = 29


class Pace:
    """How long all layers of a network take, and how they spend it; shared by its copies, so that all can be slowed
    down at once.
    """

    def __init__(self, forward_s: float) -> None:
        self.forward_s = forward_s
        """F: the forward of one layer. Its backward takes twice as long."""
        self.factor = 1.0
        """By how much longer everything takes now, as on a slow rank or with more samples."""

    def spend(self, seconds: float) -> None:
        """Let the time pass that a layer takes."""
        time.sleep(seconds * self.factor)


class PacedLayer(nn.Module):
    """One weight of shape `[numel / COLUMNS, COLUMNS]`, at least 2-D so that PowerSGD compresses its gradient."""

    def __init__(self, numel: int, pace: Pace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel // COLUMNS, COLUMNS))
        self._pace = pace

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result have shape `[1]`."""
        result: Tensor = _Paced.apply(x, self.weight, self._pace)
        return result


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pace: Pace) -> Tensor:
        ctx.pace, ctx.shape = pace, weight.shape
        # Read before the time that stands for using it.
        result = x + weight[0, :1]
        pace.spend(pace.forward_s)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.pace.spend(2 * ctx.pace.forward_s)
        # Costs nothing to make; autograd writes it out once, as a kernel would.
        return gradient, gradient.expand(ctx.shape), None


def layer_sizes(parameters: int, layers: int, profile: str) -> list[int]:
    """Elements of each layer's weight, first layer first, all multiples of `COLUMNS`.

    `uniform`: all alike. `heavy-end`: growing towards the end of the network, as in a ResNet.

    Raises:
        ValueError: if there are too few parameters for a row in each layer.
    """
    shares = [GROWTH[profile] ** (4 * layer / layers) for layer in range(layers)]
    rows = parameters // COLUMNS
    ends = [round(rows * sum(shares[: layer + 1]) / sum(shares)) for layer in range(layers)]
    sizes = [COLUMNS * (end - start) for start, end in itertools.pairwise([0, *ends])]
    if min(sizes) <= 0:
        raise ValueError(f"{parameters} parameters are too few for {layers} layers of at least {COLUMNS} ({profile})")
    return sizes


def paced_network(sizes: list[int], blocks: int, pace: Pace) -> nn.Sequential:
    """`blocks` blocks with equally many layers, which run one after the other."""
    per_block = len(sizes) // blocks
    return nn.Sequential(
        *(
            nn.Sequential(*(PacedLayer(size, pace) for size in sizes[start : start + per_block]))
            for start in range(0, len(sizes), per_block)
        )
    )


def sleep_accurately() -> None:
    """Let this thread's sleeps end on time. Linux lets them end up to 50 us late, to save power."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
