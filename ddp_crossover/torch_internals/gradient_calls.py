"""Torch's own functions that clip and unscale gradients, seen from the operators that they call."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ddp_crossover.torch_internals.private import private

_TORCH = os.path.dirname(torch.__file__)
_OURS = os.path.dirname(os.path.dirname(__file__))


class GradientCall(enum.Enum):
    """What torch does to a list of gradients."""

    NORM = "takes their norm"
    CLIP = "multiplies them by the factor of clipping"
    UNSCALE = "unscales them and looks for infinities"


_FUNCTIONS: dict[tuple[str, str], GradientCall] = {
    (clip_grad.__name__, "_get_total_norm"): GradientCall.NORM,
    (clip_grad.__name__, "_clip_grads_with_norm_"): GradientCall.CLIP,
    (torch.amp.grad_scaler.__name__, "_unscale_grads_"): GradientCall.UNSCALE,
}


class Caller(NamedTuple):
    """The function of torch that called an operator.

    Attributes:
        call: what it does.
        gradients: for ``NORM``, the list of all gradients whose norm is taken; a new list at every call.
    """

    call: GradientCall
    gradients: Sequence[Tensor]


def require_gradient_calls() -> None:
    """Raise RuntimeError if :func:`gradient_caller` does not know the functions of this version of torch."""
    private(torch.amp.GradScaler, "_unscale_grads_")
    private(clip_grad, "_clip_grads_with_norm_")
    if "tensors" not in private(clip_grad, "_get_total_norm").__wrapped__.__code__.co_varnames:
        private(clip_grad, "_get_total_norm(tensors)")


def gradient_caller() -> Caller | None:
    """The function of torch that is running, if it clips or unscales; None if a script has called the operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        call = _FUNCTIONS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if call is not None:
            gradients = frame.f_locals.get("tensors") if call is GradientCall.NORM else None
            return Caller(call, gradients if isinstance(gradients, list) else [])
        frame = frame.f_back
    return None


# The operators that these functions call, each with the gradients as its first argument.
FOREACH_NORM: Callable[..., list[Tensor]] = private(torch, "_foreach_norm")
FOREACH_MUL_: Callable[..., object] = private(torch, "_foreach_mul_")
FOREACH_UNSCALE_: Callable[..., object] = private(torch, "_amp_foreach_non_finite_check_and_unscale_")


def require_on_device(condition: Tensor, message: str) -> None:
    """Raise RuntimeError with ``message`` unless the 0-dim ``condition`` holds; on CUDA when the device gets there."""
    private(torch, "_assert_async")(condition, message)
