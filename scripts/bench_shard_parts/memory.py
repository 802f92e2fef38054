"""Measures memory: starts fresh ranks for each arm, again and again, and makes the record of what they say."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from bench_kit import record
from bench_kit.display import Display
from bench_kit.launch import CaseFailed, OnProgress, news_to, over_loopback, rank_environment
from bench_shard_parts import report
from bench_shard_parts.settings import MemorySettings

# With a fixed threshold each tensor of this size or more is memory of its own, which goes back to the system when the
# tensor does. By default glibc raises the threshold up to 32 MiB, and then keeps what it got.
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
FIGURES = ("optimizer_state_bytes", "rss_bytes", "peak_rss_bytes")
REFUSED_EXIT_CODE = 2

Measured = dict[MemorySettings, list[list[dict[str, Any]]]]
"""For each arm and number of ranks, the figures of all ranks, one list for each repeat."""


def run(args: argparse.Namespace, refused: list[str]) -> int:
    """Measure all arms. Appends those that could not run, with the reason, to `refused`.

    Returns:
        2 if memory cannot be measured here, 1 if an arm failed, else 0.
    """
    if reason := _why_not_here():
        print(f"bench_shard: {reason}", file=sys.stderr)
        return REFUSED_EXIT_CODE
    console, config = Console(), configuration(args)
    record.show_configuration(config)
    measured: Measured = {settings: [] for settings in make_cases(args)}
    reasons: dict[MemorySettings, str] = {}
    try:
        with Display(console, args.repeats * len(measured)) as display:
            for _ in range(args.repeats):
                for settings in measured:
                    display.begin(settings.name)
                    if settings in reasons:
                        continue
                    result = measure(settings, display.update)
                    if result["refused"]:
                        reasons[settings] = result["refused"]
                    else:
                        measured[settings].append(result["figures"])
                    record.write({"configuration": config, "cases": summarize(measured, reasons)}, args.json)
    except CaseFailed as error:
        print(f"bench_shard: {settings.name}: {error}", file=sys.stderr)
        return 1
    report.print_memory(console, summarize(measured, reasons), config)
    refused.extend(f"{settings.name}: {reason}" for settings, reason in reasons.items())
    return 0


def make_cases(args: argparse.Namespace) -> list[MemorySettings]:
    """All arms with each number of ranks."""
    return [
        MemorySettings(arm, ranks, args.optimizer, args.layers, args.width, args.rows, args.steps)
        for ranks in args.ranks
        for arm in args.arms
    ]


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the figures depend on."""
    return record.configuration(
        args,
        network="loopback, fresh processes for each arm",
        torch=torch.__version__,
        backend="gloo",
        parameters=args.layers * args.width * (args.width + 1),
        glibc=f"{os.confstr('CS_GNU_LIBC_VERSION')}, {', '.join('='.join(item) for item in GLIBC.items())}, "
        "malloc_trim(0) before RSS is read",
        all_arms_share=f"{args.optimizer}, gradient_as_bucket_view=True, 1 thread per rank",
    )


def measure(settings: MemorySettings, on_progress: OnProgress) -> dict[str, Any]:
    """Measure one arm in fresh ranks; returns what they wrote.

    Raises:
        CaseFailed: when a rank ended with an error.
    """

    with tempfile.TemporaryDirectory(prefix="bench-") as directory, over_loopback(settings.ranks) as run_ranks:
        settings_file, result_file = Path(directory, "settings.json"), Path(directory, "result.json")
        settings.write(settings_file)
        command = ["-m", "bench_shard_parts.memory_rank", str(settings_file), str(result_file)]
        run_ranks(command, rank_environment() | GLIBC, news_to(on_progress))
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result


def summarize(measured: Measured, reasons: dict[MemorySettings, str]) -> list[dict[str, Any]]:
    """The record: for each arm and number of ranks the rank that holds most, as median and range over repeats.

    `beyond_ddp` holds how far each median is above that of plain DDP. Pure.
    """
    cases = []
    for settings, repeats in measured.items():
        case: dict[str, Any] = {
            "arm": settings.arm, "ranks": settings.ranks, "refused": reasons.get(settings), "repeats": repeats,
        }  # fmt: skip
        if repeats:
            case |= {figure: _range([max(rank[figure] for rank in ranks) for ranks in repeats]) for figure in FIGURES}
        cases.append(case)
    plain = {case["ranks"]: case for case in cases if case["arm"] == "ddp" and case["repeats"]}
    for case in cases:
        if case["repeats"] and case["ranks"] in plain:
            ddp = plain[case["ranks"]]
            case["beyond_ddp"] = {figure: case[figure]["median"] - ddp[figure]["median"] for figure in FIGURES}
            total_bytes = ddp["optimizer_state_bytes"]["median"]
            case["state_share"] = case["optimizer_state_bytes"]["median"] / total_bytes if total_bytes else None
    return cases


def _range(values: Sequence[int]) -> dict[str, float]:
    return {"median": median(values), "low": min(values), "high": max(values)}


def _why_not_here() -> str | None:
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names or not os.access("/proc/self/clear_refs", os.W_OK):
        return "--memory needs Linux with glibc and a writable /proc/self/clear_refs"
    return None
