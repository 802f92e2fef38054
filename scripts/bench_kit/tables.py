"""How benches print: tables of figures, and lines of text beside them."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def make_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, **options: Any) -> Table:
    """A table whose columns are right-aligned, except for so many on the left; `options` are those of rich."""
    table = Table(**{"box": box.SIMPLE, "padding": (0, 1)} | options)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print all figures of a table: where the console is too narrow, a terminal wraps its lines.

    rich would cut cells instead. It takes what is no terminal for 80 columns wide.
    """
    narrow = console.width
    console.width = max(narrow, table.__rich_measure__(console, console.options.update(width=2**10)).maximum)
    try:
        console.print(table, crop=False)
    finally:
        console.width = narrow


def say(console: Console, line: str) -> None:
    """Print a line as it is, which a terminal may wrap."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
