"""``lease top``: shows a broker's figures as a table that is updated live."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_LEGEND = (
    "slower: by what waits made the job slower. held, gap: shares of its time. filled: share of its gaps in which "
    "another job held. /s: hand-offs to the job per second."
)


def as_table(status: dict[str, Any]) -> RenderableType:
    """Render ``status``, which has shares (:func:`.command.with_shares`), as one table per resource."""
    parts: list[RenderableType] = []
    for resource in sorted(status["resources"], key=lambda r: r["resource"]):
        parts += [_headline(resource), _jobs(resource), Text()]
    if not parts:
        parts = [Text("no job is connected"), Text()]
    return Group(*parts, Text(_LEGEND, style="dim"))


def _headline(resource: dict[str, Any]) -> Text:
    waiting = ", ".join(resource["waiting"]) or "nobody"
    line = Text(resource["resource"], style="bold", no_wrap=True, overflow="ellipsis")
    line.append(f"  held by {resource['holder'] or 'nobody'}, {waiting} waiting", style="not bold")
    return line


def _jobs(resource: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True, header_style="dim")
    table.add_column("job", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("role", no_wrap=True, min_width=6)
    for name in ("slower", "held", "gap", "filled", "/s"):
        table.add_column(name, justify="right", no_wrap=True, min_width=6 if name == "/s" else 4)
    for job in sorted(resource["jobs"], key=lambda j: (j["role"] != "peer", -j["held"], j["job"])):
        style = "green" if job["job"] == resource["holder"] else ""
        table.add_row(
            Text(job["job"], style=style),
            job["role"],
            *(f"{job[share]:.0%}" for share in ("slower", "held", "gap")),
            f"{job['gap_filled']:.0%}" if job["gap"] else "-",
            f"{job['handoffs_per_s']:.1f}",
        )
    return table


def show(statuses: Iterable[dict[str, Any]]) -> None:
    """Show ``statuses``: updated in place on a terminal, else one below the other. Errors of the iterable propagate."""
    console = Console()
    if not console.is_terminal:
        for status in statuses:
            console.print(as_table(status))
        return
    with Live(console=console, auto_refresh=False) as live:
        for status in statuses:
            live.update(as_table(status), refresh=True)
