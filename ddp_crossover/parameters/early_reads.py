"""Who makes a step wait: the line of the user's script that needs all updates, or all gradients, at once."""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import FrameType

import torch

_OURS = os.path.dirname(os.path.dirname(__file__))
_TORCH = os.path.dirname(torch.__file__)
_LIBRARIES = (os.sep + "site-packages" + os.sep, os.path.dirname(os.__file__) + os.sep)

# Of modules, optimizers and parameters, and of what users and frameworks put around them.
_SAVING = ("state_dict", "__reduce_ex__", "__deepcopy__")


class Looks:
    """Names the first look of each step.

    Attributes:
        counts: in how many steps each line was the first.
        is_inside_forward: the model's forward is running, which is where updates are needed.
        is_explained: this step waits for a reason that is known.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.is_inside_forward = False
        self.is_explained = False

    def next_step(self) -> None:
        """The gradients of another step have been computed."""
        self.is_explained = False

    def at_parameters(self) -> None:
        """Somebody needs an update."""
        if not self.is_inside_forward:
            self._note("reads or writes parameters between optimizer.step() and the next forward")

    def at_gradients(self) -> None:
        """Somebody needs a gradient that is on the wire."""
        self._note("reads gradients")

    def _note(self, what: str) -> None:
        if not self.is_explained:
            self.is_explained = True
            self.counts[f"{caller()} {what}"] += 1


def is_saving() -> bool:
    """Whether the caller's caller is about to read the whole state: for a checkpoint, a copy, a pickle."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _SAVING:
            return True
        frame = frame.f_back
    return False


def caller() -> str:
    """File and line of the nearest caller that is not a library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_OURS, _TORCH, "<")) and not any(library in path for library in _LIBRARIES):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library"
