"""By what ``torch.amp.GradScaler`` has multiplied the loss, for state in units of gradients that outlives a step."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from ddp_crossover.torch_internals.private import private

_latest: weakref.ref[GradScaler] | None = None
_is_watching = False


class LossScale:
    """The factor of the loss whose backward begins.

    Args:
        is_watched: whether it is needed: from then on all scalers of the process are watched. Else it is 1.
    """

    def __init__(self, *, is_watched: bool) -> None:
        self._is_watched = is_watched
        if is_watched:
            _watch()

    def take(self) -> float | Tensor:
        """The scale of the scaler that has multiplied a loss since the last call, on its device; 1 if none has."""
        global _latest
        scaler = _latest() if self._is_watched and _latest is not None else None
        _latest = None
        if scaler is None or not scaler.is_enabled():
            return 1.0
        scale: Tensor | None = private(scaler, "_get_scale_async")()
        if scale is None:
            return 1.0
        return float(scale) if scale.is_cpu else scale.clone()  # the host does not wait for another device


def _watch() -> None:
    global _is_watching
    if _is_watching:
        return
    _is_watching = True
    scale = GradScaler.scale

    @functools.wraps(scale)
    def noted(scaler: GradScaler, outputs: Any) -> Any:
        global _latest
        _latest = weakref.ref(scaler)
        return scale(scaler, outputs)

    torch.amp.GradScaler.scale = noted  # type: ignore[method-assign, assignment]
