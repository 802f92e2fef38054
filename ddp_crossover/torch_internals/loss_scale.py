"""By what ``torch.amp.GradScaler`` has multiplied the loss, for state in units of gradients that outlives a step."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.amp import GradScaler

_is_watching = False
_watchers: weakref.WeakSet[LossScale] = weakref.WeakSet()


class LossScale:
    """The factor of the loss whose backward begins.

    Each model has one: the backward of one loss, or of the losses of one step, may go through several models.

    Args:
        is_watched: whether it is needed: from then on all scalers of the process are watched. Else it is 1.
    """

    def __init__(self, *, is_watched: bool) -> None:
        self._latest: weakref.ref[GradScaler] | None = None
        if is_watched:
            _watchers.add(self)
            _watch()

    def note(self, scaler: GradScaler) -> None:
        """Note that ``scaler`` multiplies a loss."""
        self._latest = weakref.ref(scaler)

    def take(self) -> float:
        """The scale of the scaler that has multiplied a loss since the last call; 1 if none has."""
        scaler = None if self._latest is None else self._latest()
        self._latest = None
        return 1.0 if scaler is None else float(scaler.get_scale())


def _watch() -> None:
    global _is_watching
    if _is_watching:
        return
    _is_watching = True
    scale = GradScaler.scale

    @functools.wraps(scale)
    def noted(scaler: GradScaler, outputs: Any) -> Any:
        for watcher in tuple(_watchers):
            watcher.note(scaler)
        return scale(scaler, outputs)

    torch.amp.GradScaler.scale = noted  # type: ignore[method-assign, assignment]
