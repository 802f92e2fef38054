"""A model and data for trainers that take any."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def net() -> nn.Sequential:
    """A network of points, with buffers."""
    return nn.Sequential(
        nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3)
    )


def points(count: int) -> TensorDataset:
    """Points of three classes, the same whenever they are made: x (12,), float32, and y (), int64."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 12, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))
