"""By what ``torch.amp.GradScaler`` has multiplied the loss, for state in units of gradients that outlives a step."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from ddp_crossover.torch_internals.private import private


class _Calls:
    """Calls of ``GradScaler.scale`` in this process.

    Attributes:
        count: how many there were since they are watched.
        latest: the scaler of the latest.
    """

    def __init__(self) -> None:
        self.count = 0
        self.latest: weakref.ref[GradScaler] | None = None
        self.are_watched = False

    def watch(self) -> None:
        """Count calls from now on."""
        if self.are_watched:
            return
        self.are_watched = True
        scale = GradScaler.scale

        @functools.wraps(scale)
        def noted(scaler: GradScaler, outputs: Any) -> Any:
            self.count += 1
            self.latest = weakref.ref(scaler)
            return scale(scaler, outputs)

        torch.amp.GradScaler.scale = noted  # type: ignore[method-assign, assignment]


_calls = _Calls()


class LossScale:
    """The factor of the loss whose backward begins, for one model.

    Args:
        is_watched: whether it is needed: from then on all scalers of the process are watched. Else it is 1.
    """

    def __init__(self, *, is_watched: bool) -> None:
        self._is_watched = is_watched
        if is_watched:
            _calls.watch()
        self._seen = _calls.count

    def take(self) -> float | Tensor:
        """The scale of the scaler that has multiplied a loss since the last call, on its device; 1 if none has."""
        scaler = _calls.latest() if self._is_watched and _calls.latest and _calls.count != self._seen else None
        self._seen = _calls.count
        if scaler is None or not scaler.is_enabled():
            return 1.0
        scale: Tensor | None = private(scaler, "_get_scale_async")()
        if scale is None:
            return 1.0
        return float(scale) if scale.is_cpu else scale.clone()  # the host does not wait for another device
