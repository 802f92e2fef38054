"""Show the data caches in a directory, check their samples, or remove them.

Exit status: 0 if all went well, 1 if --check found damaged samples, 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from ddp_crossover.addons.data.about import ABOUT, read_about
from ddp_crossover.addons.data.sample_store import INDEX, SAMPLES, StoredSamples
from ddp_crossover.log import short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their options to ``parser``."""
    verbs = parser.add_subparsers(dest="verb", required=True)
    info = verbs.add_parser("info", help="list the caches: data set, samples, size, last use")
    info.add_argument("--check", action="store_true", help="read all samples and compare their checksums")
    info.add_argument("--json", action="store_true", help="print the list as JSON")
    clear = verbs.add_parser("clear", help="remove caches; jobs that use one go on, and make samples themselves")
    for verb in (info, clear):
        verb.add_argument("directory", type=Path, help="what CachedDataset was given as dir")
    clear.add_argument("keys", nargs="*", metavar="KEY", help="first characters of the key (default: all caches)")


def run(args: argparse.Namespace) -> int:
    """Run the verb in ``args`` and return the exit status."""
    if not args.directory.is_dir():
        raise ValueError(f"{args.directory} is no directory: give what CachedDataset was given as dir")
    caches = sorted(path.parent for path in args.directory.glob(f"*/{INDEX}") if _is_cache(path.parent))
    if args.verb == "clear":
        return _clear(_chosen(caches, args.keys))
    rows = [_describe(cache, check=args.check) for cache in caches]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _show(rows, args.directory)
    return 1 if any(row["damaged"] for row in rows) else 0


def _is_cache(directory: Path) -> bool:
    """Whether a directory is one of ours: others may have files of these names as well."""
    return re.fullmatch("[0-9a-f]{64}", directory.name) is not None and (directory / SAMPLES).is_file()


def _chosen(caches: list[Path], keys: list[str]) -> list[Path]:
    for key in keys:
        if not key:
            raise ValueError("an empty key: give the first characters of one, or none to remove all caches")
        if not any(cache.name.startswith(key) for cache in caches):
            raise ValueError(f"no cache with key {key}: see `cache info`")
    return [cache for cache in caches if not keys or cache.name.startswith(tuple(keys))]


def _describe(cache: Path, *, check: bool) -> dict[str, Any]:
    samples = StoredSamples(cache)
    numbers = samples.numbers()
    damaged = None
    if check:
        shown = track(numbers, f"checking {cache.name[:12]}", console=Console(stderr=True), transient=True)
        damaged = sum(not samples.is_whole(number) for number in shown)
    about = read_about(cache)
    return {
        "key": cache.name,
        "dataset": about.get("dataset", "?"),
        "cached": about.get("cached", "?"),
        "stored": len(numbers),
        "samples": about.get("samples"),
        "gb": (cache / SAMPLES).stat().st_size / 1e9,
        "last_write": time.strftime("%Y-%m-%d %H:%M", time.localtime((cache / INDEX).stat().st_mtime)),
        "damaged": damaged,
    }


def _show(rows: list[dict[str, Any]], directory: Path) -> None:
    for row in rows:
        stored = f"{row['stored']:,} of {row['samples']:,}" if row["samples"] is not None else f"{row['stored']:,}"
        damaged = f", {row['damaged']:,} damaged" if row["damaged"] is not None else ""
        print(f"{row['key'][:12]}  {stored} samples{damaged}, {short(row['gb'])} GB, last write {row['last_write']}")
        print(f"    data set  {row['dataset']}\n    cached    {row['cached']}")
    if not rows:
        print(f"no caches in {directory}")


def _clear(caches: list[Path]) -> int:
    for cache in caches:
        freed_bytes = (cache / SAMPLES).stat().st_size
        for path in [cache / INDEX, cache / SAMPLES, *cache.glob(f"{ABOUT}*")]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is in it
            os.rmdir(cache)
        print(f"removed {cache} ({short(freed_bytes / 1e9)} GB)")
    if not caches:
        print("nothing to remove")
    return 0
