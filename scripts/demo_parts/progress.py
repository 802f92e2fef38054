"""What the demo does now, and how many seconds are left: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterable
from types import TracebackType

from rich import progress
from rich.console import Console, RenderableType

LINE_EVERY_S = 15.0


class _ByTheClock(progress.Progress):
    """A bar that follows the clock between two pieces of news, from `begin_s` on, by `time.time()`."""

    begin_s = 0.0

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            task.completed = min(time.time() - self.begin_s, task.total or 0.0)
            task.fields["left"] = max(0.0, (task.total or 0.0) - task.completed)
        yield from super().get_renderables()


class Progress:
    """A context manager. Times are those of `time.time()`.

    Args:
        console: where it is shown.
        begin_s: when the command was given.
        end_s: when it is expected to end.
    """

    def __init__(self, console: Console, begin_s: float, end_s: float) -> None:
        self._console, self._end_s, self._last_line_s = console, end_s, begin_s
        self._bar = _ByTheClock(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[left]:.0f} s left"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            refresh_per_second=2,  # it takes time from what is measured
        )
        self._bar.begin_s = begin_s
        self._task = self._bar.add_task("starting", total=end_s - begin_s, left=end_s - begin_s)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def doing(self, what: str) -> None:
        """Tell what is done now."""
        self._bar.update(self._task, description=what)
        if not self._console.is_terminal and time.time() - self._last_line_s > LINE_EVERY_S:
            line = f"{what}, {self.left_s():.0f} s left"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._last_line_s = time.time()

    def left_s(self) -> float:
        """Seconds until the expected end."""
        return max(0.0, self._end_s - time.time())

    def takes_at_least(self, seconds: float) -> None:
        """Expect the end later, if what is left takes longer than there is time for."""
        if seconds > self.left_s():
            self.ends_in(seconds)

    def ends_in(self, seconds: float) -> None:
        """Expect the end in so many seconds."""
        self._end_s = time.time() + seconds
        self._bar.update(self._task, total=self._end_s - self._bar.begin_s)
