"""Ends a script in the middle of its training, after some steps, and tells how far it has come."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

_STEPS_MADE = "steps_made"  # file in the run's folder


class Ending:
    """Counts steps, and ends the script at the last one.

    Args:
        folder: where rank 0 says how many steps there are so far.
        steps: after how many to end.
        write: called before.
    """

    def __init__(self, folder: Path, steps: int, write: Callable[[], None]) -> None:
        self._path = folder / _STEPS_MADE if dist.get_rank() == 0 else None
        self._steps = steps
        self._write = write

    def note(self, steps: int) -> None:
        """Note how many steps have been made; does not return from the last one.

        The process ends at once, when all ranks are here: one whose groups were not destroyed may be aborted when the
        interpreter is taken down.
        """
        if self._path is not None:
            self._path.write_text(f"{steps}\n")
        if steps < self._steps:
            return
        self._write()
        if dist.is_initialized():
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def steps_made(folder: Path) -> int:
    """Return how many steps rank 0 has made so far in the run with this folder."""
    try:
        text = (folder / _STEPS_MADE).read_text()
    except FileNotFoundError:
        return 0
    return int(text) if text.endswith("\n") else 0  # caught in the middle of a write
