"""Measure how fast loaders deliver pictures, and the memory that they take: decoded each time, or read from a cache.

    python scripts/bench_data.py                                     # 2,000 JPEGs of 1280 x 960, 2 ranks of 1 worker
    python scripts/bench_data.py --workers 2 --arms live,cached --json data.json

Makes a folder of pictures (a minute), then all ranks run through it with a DataLoader each, as in training, but without
a model. In each round every arm starts anew and runs a first epoch and further ones. An arm whose package is missing
says so. docs/data-cache.md explains the figures.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench_data_parts.arms import ARMS, why_not
from bench_data_parts.pictures import make_pictures
from bench_data_parts.rank import Task, run_ranks
from bench_kit import record
from bench_kit.options import add_results, make_parser, names, positive_int


def measure(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """One row for each arm: seconds of each epoch of each round, and the memory at the end of its last one."""
    rows = {arm: {"arm": arm, "epochs_s": [], "process_mb": [], "file_mb": []} for arm in args.arms}
    turns = [(number, arm) for number in range(args.rounds) for arm in args.arms]
    for number, arm in track(turns, "epochs", console=Console(stderr=True), transient=True):
        task = Task(arm, directory / "pictures", directory / f"{arm}-{number}", args.workers, args.batch, args.epochs)
        result = run_ranks(task, args.ranks)
        rows[arm]["epochs_s"].append(result.epochs_s)
        rows[arm]["process_mb"].append(result.process_mb)
        rows[arm]["file_mb"].append(result.file_mb)
    return list(rows.values())


def print_rows(rows: list[dict[str, Any]], pictures: int) -> None:
    """The table: pictures a second, medians over rounds with the lowest and the highest, and megabytes."""
    table = Table(box=box.SIMPLE)
    speeds = ("first epoch, pictures/s", "later epochs, pictures/s")
    for column in ("arm", *speeds, "memory of processes, MB", "of files, MB"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in rows:
        first = [pictures / epochs_s[0] for epochs_s in row["epochs_s"]]
        later = [pictures / statistics.median(epochs_s[1:]) for epochs_s in row["epochs_s"]]
        memory = (f"{statistics.median(row[name]):.0f}" for name in ("process_mb", "file_mb"))
        table.add_row(row["arm"], _spread(first), _spread(later), *memory)
    Console().print(table)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def main() -> int:
    """Make the pictures, measure, and print."""
    parser = make_parser(__doc__, "arms:\n" + "\n".join(f"  {name:10}{arm.meaning}" for name, arm in ARMS.items()))
    add = parser.add_argument
    add("--arms", type=names(list(ARMS)), default=list(ARMS), metavar="ARM,...", help="listed below (all)")
    add("--pictures", type=positive_int, default=2000, help="number of pictures (%(default)s)")
    add("--width", type=positive_int, default=1280, help="of a picture, in pixels (%(default)s)")
    add("--height", type=positive_int, default=960, help="of a picture, in pixels (%(default)s)")
    add("--ranks", type=positive_int, default=2, help="(%(default)s)")
    add("--workers", type=positive_int, default=1, help="processes that load, for each rank (%(default)s)")
    add("--batch", type=positive_int, default=32, help="pictures of a batch (%(default)s)")
    add("--epochs", type=positive_int, default=3, help="of each turn, 2 or more (%(default)s)")
    add("--rounds", type=positive_int, default=3, help="turns of each arm (%(default)s)")
    add("--dir", type=Path, help="directory for pictures and caches, on the disk to measure (a temporary one)")
    add_results(parser)
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error("--epochs must be 2 or more: the first one fills the cache")
    for arm in [arm for arm in args.arms if why_not(arm)]:
        print(f"without {arm}: {why_not(arm)}", file=sys.stderr)
        args.arms.remove(arm)
    configuration = record.configuration(args, torch=torch.__version__, storage="pictures are in the page cache")
    record.show_configuration(configuration)
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        size = (args.width, args.height)
        mean_kb = make_pictures(Path(directory) / "pictures", args.pictures, size)
        print(f"{args.pictures} JPEGs of {args.width} x {args.height}, {mean_kb:.0f} kB each", flush=True)
        rows = measure(args, Path(directory))
    print_rows(rows, args.pictures)
    record.write({"configuration": configuration | {"mean_kb": mean_kb}, "rows": rows}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
