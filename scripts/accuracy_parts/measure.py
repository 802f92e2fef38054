"""Runs all cases, each on fresh ranks, and makes the record."""

import argparse
import hashlib
import importlib.metadata
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from rich.console import Console

from accuracy_parts import rank
from accuracy_parts.rank import CaseSettings
from accuracy_parts.samples import WINDOW_BYTES, topics_text
from accuracy_parts.tasks import TASKS
from bench_kit import record
from bench_kit.display import Display
from bench_kit.launch import CaseFailed, RunRanks, on_lab, over_loopback
from bench_kit.on_ranks import measure_on_ranks
from lab import LabError


def make_cases(args: argparse.Namespace) -> list[CaseSettings]:
    """All wires on each task."""
    return [
        CaseSettings(
            task,
            wire,
            args.ranks,
            args.seeds,
            args.steps or TASKS[task].steps,
            None if args.rate else args.fusion_mb,
            args.evaluate_every,
        )
        for task in args.tasks
        for wire in args.wires
    ]


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the figures depend on."""
    text = topics_text()
    return record.configuration(
        args,
        network=f"{_network(args)}, fresh processes for each wire and task",
        torch=torch.__version__,
        torchvision=_version("torchvision"),
        scikit_learn=_version("scikit-learn"),
        ddp_crossover=_version("ddp_crossover"),
        backend="gloo",
        all_wires_share="1 thread per rank, learning rate with warm-up and then half a cosine to zero",
        optimizers={name: TASKS[name].optimizer for name in args.tasks},
        batch_size_per_rank={name: TASKS[name].batch_size for name in args.tasks},
        text=f"pydoc_data.topics, {len(text)} bytes, SHA-256 {hashlib.sha256(text).hexdigest()[:12]}, "
        f"windows of {WINDOW_BYTES} bytes",
    )


def _network(args: argparse.Namespace) -> str:
    if not args.rate:
        return "loopback"
    later = f" and packets arrive {args.delay_ms:g} ms later" if args.delay_ms else ""
    return f"hosts of one core that send at most {args.rate}{later}"


def _version(package: str) -> str | None:
    """The version of an installed package; None in a checkout that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_all(args: argparse.Namespace, console: Console, on_result: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Train all cases; returns the record, and gives it to `on_result` after each of them.

    A case that fails does not end the others: the record has what its ranks printed.
    """
    cases = make_cases(args)
    result: dict[str, Any] = {"configuration": configuration(args), "cases": []}
    record.show_configuration(result["configuration"])
    with Display(console, len(cases)) as display:
        for settings in cases:
            display.begin(settings.name)
            case: dict[str, Any] = {
                "task": settings.task, "wire": settings.wire, "steps": settings.steps, "failed": None, "runs": [],
            }  # fmt: skip
            try:
                with _network_of(args) as run_ranks:
                    case["runs"] = measure_on_ranks(rank.measure, settings, run_ranks, display.update)
            except (CaseFailed, LabError) as error:
                case["failed"] = str(error)
                print(f"accuracy: {settings.name}: {error}", file=sys.stderr)
            result["cases"].append(case)
            on_result(result)
    return result


def _network_of(args: argparse.Namespace) -> AbstractContextManager[RunRanks]:
    return on_lab(args.ranks, args.rate, delay_ms=args.delay_ms) if args.rate else over_loopback(args.ranks)
