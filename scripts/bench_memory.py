"""Measure what each mode of the package needs beyond plain DDP: memory of fresh ranks over loopback, on CPU.

    python scripts/bench_memory.py
    python scripts/bench_memory.py --ranks 4 --modes default,shard --json memory.json

Each mode trains a stack of equal linear layers with AdamW, in processes of its own. Its resident memory after some
steps, and the peak until then, are those of the rank that has most. docs/guide.md has what to expect.
"""

import argparse
import os
from typing import Any

import torch
from rich.console import Console

from bench_kit import record
from bench_kit.launch import over_loopback
from bench_kit.on_ranks import measure_on_ranks
from bench_kit.options import add_results, make_parser, names, positive_int
from bench_kit.tables import print_table
from bench_parts.memory import MODES, measure

# glibc then gives free memory back at once, so that what is resident is in use.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


def summarize(measured: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What each mode has beyond the first one, in bytes per parameter."""
    first = next(iter(measured.values()))
    return [
        {"mode": mode}
        | figures
        | {f"{name}_beyond": (figures[key] - first[key]) / figures["parameters"] for name, key in _BEYOND.items()}
        for mode, figures in measured.items()
    ]


_BEYOND = {"resident": "resident_bytes", "peak": "peak_bytes"}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the file that `--json` asks for."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=positive_int, default=2, help="(%(default)s)")
    parser.add_argument(
        "--modes", type=names(list(MODES)), default=list(MODES), metavar="NAME,...", help=f"{', '.join(MODES)} (all)"
    )
    add_results(parser)
    args: argparse.Namespace = parser.parse_args(arguments)
    console = Console()
    config = record.configuration(args, torch=torch.__version__, backend="gloo", optimizer="AdamW")
    record.show_configuration(config)
    os.environ |= GIVE_BACK
    measured = {}
    with over_loopback(args.ranks) as run_ranks:
        for mode in dict.fromkeys(["ddp", *args.modes]):
            console.print(f"measuring {mode} ...")
            measured[mode] = measure_on_ranks(measure, mode, run_ranks)
    modes = summarize(measured)
    console.print(f"\nMemory on {args.ranks} ranks, {modes[0]['parameters'] / 1e6:.1f} M fp32 parameters")
    headings = ["mode", "MiB", "peak MiB", "bytes per parameter beyond DDP", "at the peak"]
    print_table(console, headings, map(_cells, modes))
    record.write({"configuration": config, "modes": modes}, args.json)


def _cells(mode: dict[str, Any]) -> list[str]:
    return [
        mode["mode"],
        f"{mode['resident_bytes'] / 2**20:.0f}",
        f"{mode['peak_bytes'] / 2**20:.0f}",
        f"{mode['resident_beyond']:+.1f}",
        f"{mode['peak_beyond']:+.1f}",
    ]


if __name__ == "__main__":
    main()
