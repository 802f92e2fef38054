"""Progress of the training, shown by rank 0: a progress bar on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_LINE_EVERY_S = 15.0


class Display:
    """A context manager that shows nothing on ranks other than 0."""

    def __init__(self, rank: int, epochs: int, updates_per_epoch: int) -> None:
        self._console = Console(quiet=rank != 0, highlight=False)
        self._epochs = epochs
        self._updates_per_epoch = updates_per_epoch
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if rank == 0 and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TextColumn("updates"), TimeRemainingColumn(), console=self._console, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("training", total=epochs * updates_per_epoch)

    def __enter__(self) -> "Display":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def line(self, text: str) -> None:
        """Print one line (above the bar, where there is one)."""
        self._console.print(text, soft_wrap=True, markup=False)
        self._last_line = time.monotonic()

    def update(self, epoch: int, done: int) -> None:
        """Tell that `done` updates of the epoch with this number (from 1) are done."""
        if self._bar:
            completed = (epoch - 1) * self._updates_per_epoch + done
            self._bar.update(self._task, completed=completed, description=f"epoch {epoch}/{self._epochs}")
        elif time.monotonic() - self._last_line > PLAIN_LINE_EVERY_S:
            self.line(f"epoch {epoch}/{self._epochs}  update {done}/{self._updates_per_epoch}")

    def epoch(self, result: dict[str, Any]) -> None:
        exposed = result["exposed_s_per_step"]
        self.line(
            f"epoch {result['epoch']}/{self._epochs}  loss {result['loss']:.4f}  "
            f"accuracy {result['accuracy']:.2%}  {result['samples_per_s']:.0f} samples/s"
            + (f"  exposed {exposed * 1e3:.1f} ms/step" if exposed is not None else "")
        )
