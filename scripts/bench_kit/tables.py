"""How benches print: tables of figures, and lines of text beside them."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str] = (),
    wrapped: Collection[str] = (),
    **options: Any,
) -> None:
    """Print a table with all its figures: where the console is too narrow, a terminal wraps its lines.

    rich would cut cells instead. It takes what is no terminal for 80 columns wide.

    Args:
        console: where to print it.
        headings: of the columns, which are right-aligned.
        rows: their cells.
        left: columns that are left-aligned instead, as the first one is.
        wrapped: left-aligned columns of text; where there are some, they are folded, and the table fits the console.
        options: of rich's table.
    """
    of_all: dict[str, Any] = {"box": box.SIMPLE, "padding": (0, 1)}
    table = Table(**of_all | options)
    for place, heading in enumerate(headings):
        is_left = place == 0 or heading in left or heading in wrapped
        is_wrapped = heading in wrapped
        table.add_column(
            heading,
            justify="left" if is_left else "right",
            no_wrap=not is_wrapped,
            overflow="fold" if is_wrapped else "ellipsis",
        )
    for row in rows:
        table.add_row(*row)
    narrow = console.width
    if not wrapped:
        console.width = max(narrow, table.__rich_measure__(console, console.options.update(width=2**10)).maximum)
    try:
        console.print(table, crop=False)
    finally:
        console.width = narrow


def say(console: Console, line: str) -> None:
    """Print a line as it is, which a terminal may wrap."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
