"""Progress of a run of several cases: a bar on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_LINE_EVERY_S = 15.0


class Display:
    """A context manager that shows how far a run is. A single case is not named."""

    def __init__(self, console: Console, cases: int) -> None:
        self._console, self._cases, self._case = console, cases, 0
        self._name = ""
        self._last_line = -PLAIN_LINE_EVERY_S
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("starting", total=cases)

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def begin(self, name: str) -> None:
        """Tell that the next case begins."""
        self._case += 1
        self._name = name
        self.update("starting the ranks", 0.0)

    def update(self, doing: str, behind: float) -> None:
        """Tell what is done now, and the share of the case that is over."""
        text = f"case {self._case} of {self._cases} ({self._name}): {doing}" if self._cases > 1 else doing
        self._bar.update(self._task, description=text, completed=max(0, self._case - 1) + behind)
        if not self._console.is_terminal and time.monotonic() - self._last_line > PLAIN_LINE_EVERY_S:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._last_line = time.monotonic()
