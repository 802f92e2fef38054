"""A backward that raises when a test says so."""

from __future__ import annotations

from typing import Any

import torch


class FailingBackward(torch.autograd.Function):
    """The identity, whose backward raises `error` once, if one is set."""

    error: Exception | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if (error := FailingBackward.error) is not None:
            FailingBackward.error = None
            raise error
        return gradient
