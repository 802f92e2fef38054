"""By what ``torch.amp.GradScaler`` has multiplied the loss, for state in units of gradients that outlives a step.

A process may train several models, with one scaler, with several or without, and go through several models in one
backward. So the scale belongs to the backward that begins at a scaled loss, which a hook on that loss tells.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from ddp_crossover.torch_internals.autograd import call_after_backward
from ddp_crossover.torch_internals.private import private

# That of the loss at which the backward under way has begun.
_current: weakref.ref[GradScaler] | None = None
# Whether the backward under way is that of a rank without data, whose loss would have been scaled as the last one was.
_has_no_loss = False


class LossScale:
    """The factor of the loss whose backward has begun.

    Args:
        is_watched: whether it is needed: from then on all scalers of the process are watched. Else it is 1.
    """

    def __init__(self, *, is_watched: bool) -> None:
        self._last: weakref.ref[GradScaler] | None = None
        if is_watched:
            _watch()

    def scaler(self) -> GradScaler | None:
        """What has multiplied the loss of the backward under way, or None."""
        if not _has_no_loss:
            self._last = _current
        return None if self._last is None else self._last()

    def now(self) -> float | Tensor:
        """By what the loss of the backward under way was multiplied, on the scaler's device; 1 if by nothing.

        Asked in each backward: a rank without data answers with the scaler of its last one.
        """
        scaler = self.scaler()
        scale: Tensor | None = None if scaler is None else private(scaler, "_get_scale_async")()
        if scale is None:
            return 1.0
        return float(scale) if scale.is_cpu else scale.clone()  # the host does not wait for another device


@contextmanager
def without_loss() -> Iterator[None]:
    """Context of the backward of a rank without data: all ranks unscale the same gradients, and this one has no loss.

    From now on a scaler that has not scaled a loss yet begins with its first scale, where torch's raises.
    """
    global _has_no_loss
    _begin_scalers_without_loss()
    _has_no_loss = True
    try:
        yield
    finally:
        _has_no_loss = False


@functools.cache
def _begin_scalers_without_loss() -> None:
    check = private(GradScaler, "_check_scale_growth_tracker")

    @functools.wraps(check)
    def begun(scaler: GradScaler, function_name: str) -> Any:
        if scaler._scale is None:
            private(scaler, "_lazy_init_scale_growth_tracker")(torch.device(private(scaler, "_device")))
        return check(scaler, function_name)

    GradScaler._check_scale_growth_tracker = begun  # type: ignore[method-assign, assignment]


@functools.cache
def _watch() -> None:
    scale = GradScaler.scale

    @functools.wraps(scale)
    def noted(scaler: GradScaler, outputs: Any) -> Any:
        return _hooked(scale(scaler, outputs), weakref.ref(scaler)) if scaler.is_enabled() else outputs

    torch.amp.GradScaler.scale = noted  # type: ignore[method-assign, assignment]


def _hooked(scaled: Any, scaler: weakref.ref[GradScaler]) -> Any:
    """Have the backward of scaled losses, in any structure that ``GradScaler.scale`` takes, tell their scaler."""

    def note(gradient: Tensor) -> None:
        global _current
        _current = scaler
        call_after_backward(_forget)

    if isinstance(scaled, Tensor):
        if scaled.requires_grad:
            scaled.register_hook(note)
    elif isinstance(scaled, (list, tuple)):
        for one in scaled:
            _hooked(one, scaler)
    else:
        return (_hooked(one, scaler) for one in scaled)
    return scaled


def _forget() -> None:
    global _current
    _current = None
