"""How many steps a script has made so far, for the process that waits for it."""

from __future__ import annotations

from pathlib import Path

STEPS_MADE = "steps_made"  # the file's name, or how its name ends


class StepsMade:
    """A number in a file that one process writes and another reads.

    Args:
        path: the file; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, steps: int) -> None:
        """Say how many there are now."""
        self._path.write_text(f"{steps}\n")

    def read(self) -> int:
        """Return the latest number; 0 before the first one."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return 0
        return int(text) if text.endswith("\n") else 0  # caught in the middle of a write
