"""Finds the line of the user's script that makes a step wait, because it needs updates or gradients early."""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import FrameType

import torch

from ddp_crossover.torch_internals.gradient_calls import GradientCall, gradient_caller

_OURS = os.path.dirname(os.path.dirname(__file__))
_TORCH = os.path.dirname(torch.__file__)
_LIBRARIES = (os.sep + "site-packages" + os.sep, os.path.dirname(os.__file__) + os.sep)

SOMEWHERE = "a library"
# Methods that read the whole state, of modules, optimizers, parameters, and of wrappers around them.
_SAVING = ("state_dict", "__reduce_ex__", "__deepcopy__")


class EarlyReads:
    """Records the first line of each step that needs an update or a gradient early.

    Attributes:
        counts: in how many steps each line was the first.
        is_inside_forward: whether the model's forward is running, where updates are needed anyway.
        is_explained: whether it is already known why this step waits.
        clipped_by: if torch's clipping or loss scaling was the first in this step to need gradients, which of them, and
            at which line; else None.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.is_inside_forward = False
        self.is_explained = False
        self.clipped_by: str | None = None
        self._gradients_were_read = False

    def next_step(self) -> None:
        """Start the record of the next step, whose gradients have been computed."""
        self.is_explained = self._gradients_were_read = False
        self.clipped_by = None

    def explain(self) -> None:
        """Note that it is known why this step waits."""
        self.is_explained = True

    def begin_forward(self) -> None:
        """Take needs of updates for those of the model, until :meth:`end_forward`."""
        self.is_inside_forward = True

    def end_forward(self) -> None:
        """See :meth:`begin_forward`."""
        self.is_inside_forward = False

    def note_parameter_read(self) -> None:
        """Note that an update is needed now."""
        if not self.is_inside_forward:
            self._note("reads or writes parameters between optimizer.step() and the next forward")

    def note_gradient_read(self) -> None:
        """Note that a gradient is needed that is still on the wire."""
        if not self._gradients_were_read:
            self._gradients_were_read = True
            if (reader := gradient_caller()) is not None:
                function = "GradScaler" if reader.call is GradientCall.UNSCALE else "clipping"
                self.clipped_by = f"torch's {function} at {caller()}"
        self._note("reads gradients that are still on the wire")

    def _note(self, what: str) -> None:
        if not self.is_explained:
            self.is_explained = True
            self.counts[f"{caller()} {what}"] += 1


def is_saving() -> bool:
    """Whether a function on the stack is reading the whole state, for a checkpoint, a copy or a pickle."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _SAVING:
            return True
        frame = frame.f_back
    return False


def caller() -> str:
    """File name and line of the nearest caller outside of libraries, or ``SOMEWHERE``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_OURS, _TORCH, "<")) and not any(library in path for library in _LIBRARIES):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return SOMEWHERE
