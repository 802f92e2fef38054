"""By what ``torch.amp.GradScaler`` has multiplied the loss, for state in units of gradients that outlives a step."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.amp import GradScaler

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

    def take(self) -> float:
        """The scale of the scaler that has multiplied a loss since the last call; 1 if none has."""
        global _latest
        scaler = _latest() if self._is_watched and _latest is not None else None
        _latest = None
        return 1.0 if scaler is None else float(scaler.get_scale())


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
