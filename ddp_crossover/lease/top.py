"""``lease top``: the figures of a broker as a table that follows them."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_NAMES_SHOWN = 3
_KEYS = re.compile(r"\x1b\[\d*.|.")
_STEPS = {"k": -1, "\x1b[A": -1, "j": 1, "\x1b[B": 1, "b": -10, "\x1b[5~": -10, " ": 10, "\x1b[6~": 10}
_LEGEND = (
    "held, waits, gap: shares of a job's time; alone, it would not wait. "
    "filled: share of its gaps in which another job held. /s: hand-offs to it. "
    "p50, p99: microseconds that its last 256 hand-offs took."
)


def as_table(status: dict[str, Any]) -> RenderableType:
    """``status`` with shares (:func:`.figures.with_shares`), a table for each resource."""
    parts: list[RenderableType] = []
    for resource in sorted(status["resources"], key=lambda r: r["resource"]):
        parts += [_headline(resource), _jobs(resource), Text()]
    if not parts:
        parts = [Text("nobody is connected"), Text()]
    return Group(*parts, Text(_LEGEND, style="dim"))


def _headline(resource: dict[str, Any]) -> Text:
    waiting = resource["waiting"]
    names = ", ".join(waiting[:_NAMES_SHOWN]) or "nobody"
    more = f" and {len(waiting) - _NAMES_SHOWN} more" if len(waiting) > _NAMES_SHOWN else ""
    line = Text(resource["resource"], style="bold", no_wrap=True, overflow="ellipsis")
    line.append(f"  held by {resource['holder'] or 'nobody'}, {names}{more} waiting", style="not bold")
    return line


def _jobs(resource: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True, header_style="dim")
    table.add_column("job", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("role", no_wrap=True, min_width=6)
    for name in ("held", "waits", "gap", "filled", "/s", "p50", "p99"):
        table.add_column(name, justify="right", no_wrap=True, min_width=6 if name[0] in "/p" else 4)
    for job in sorted(resource["jobs"], key=lambda j: (j["role"] != "peer", -j["held"], j["job"])):
        style = "green" if job["job"] == resource["holder"] else ""
        table.add_row(
            Text(job["job"], style=style),
            job["role"],
            *(f"{job[share]:.0%}" for share in ("held", "waited", "gap")),
            f"{job['gap_filled']:.0%}" if job["gap"] else "-",
            f"{job['handoffs_per_s']:.1f}",
            *("-" if us is None else f"{us:.0f}" for us in (job["handoff_p50_us"], job["handoff_p99_us"])),
        )
    return table


class _Page:
    """A part of something that is longer than the screen, and a line that says so."""

    def __init__(self, body: RenderableType, title: str, top: int) -> None:
        self.body = body
        self.title = title
        self.top = top

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.body, options.update(height=None))
        room = console.height - 1
        self.top = max(0, min(self.top, len(lines) - room))
        hidden = len(lines) > room
        keys = (
            f"  lines {self.top + 1}-{min(self.top + room, len(lines))} of {len(lines)}, arrows scroll"
            if hidden
            else ""
        )
        yield Text(f"{self.title}{keys}  q quits", style="reverse", no_wrap=True, overflow="ellipsis")
        for line in lines[self.top : self.top + room]:
            yield from line
            yield Segment.line()


def follow(read: Callable[[], dict[str, Any]], interval_s: float, console: Console) -> None:
    """Show what ``read`` returns, until Ctrl-C or ``q``; on a screen of its own where there is a terminal.

    Raises what ``read`` raises.
    """
    if not (console.is_terminal and sys.stdin.isatty()):
        while True:
            console.print(as_table(read()))
            time.sleep(interval_s)
    with _keyboard() as next_keys, Live(console=console, screen=True, auto_refresh=False) as live:
        top = 0
        while True:
            status = read()
            until = time.monotonic() + interval_s
            title = f"lease top: broker {status['pid']}, every {interval_s:g} s"
            while (left_s := until - time.monotonic()) > 0:
                page = _Page(as_table(status), title, top)
                live.update(page, refresh=True)
                keys = next_keys(left_s)
                if "q" in keys:
                    return
                top = page.top + sum(_STEPS.get(key, 0) for key in keys)


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[float], list[str]]]:
    """A function that waits for keys for at most so many seconds."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def next_keys(timeout_s: float) -> list[str]:
        ready = select.select([stdin], [], [], timeout_s)[0]
        return _KEYS.findall(os.read(stdin, 256).decode(errors="replace")) if ready else []

    try:
        tty.setcbreak(stdin)
        yield next_keys
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
