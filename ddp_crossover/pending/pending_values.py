"""Tells torch's functions, and compiled code, how to get at values that are pending."""

from __future__ import annotations

from torch import Tensor

from ddp_crossover.pending.pending_gradient import PendingGrad
from ddp_crossover.pending.pending_parameter import PendingParameter, touch
from ddp_crossover.torch_internals.dispatch import allow_foreach, describe_gradients_by, settle_before_use


def introduce_pending_values() -> None:
    """Let code that cannot take a pending parameter or gradient get a plain one. Once for the process is enough."""
    settle_before_use(_settled)
    describe_gradients_by(_like)
    allow_foreach(PendingParameter)
    allow_foreach(PendingGrad)


def _settled(tensor: Tensor) -> Tensor:
    """Return the tensor with its up-to-date value, after a wait if a gradient or an update is pending."""
    if isinstance(tensor, PendingGrad):
        return tensor.resolve()
    touch(tensor)
    return tensor


def _like(gradient: Tensor) -> Tensor:
    """Return a plain tensor that looks like the gradient, whose value may be pending."""
    return gradient.like() if isinstance(gradient, PendingGrad) else gradient
