"""Measure on one GPU how well DeAR and plain DDP hide communication, over an emulated wire.

    python scripts/gpu_bench.py --json gpu-bench.json                     # three models at 25 and 10 Gb/s, 20 minutes
    python scripts/gpu_bench.py --models resnet50 --gbit 25 --timeline timeline.png
    python scripts/gpu_bench.py --device cpu                              # a rehearsal: says nothing about a GPU

One rank trains. Where it would send, its stream sleeps for as long as a ring of --ranks GPUs would take for the bytes.
So compute, streams and the package are real, and only the wire is not: it takes no memory bandwidth and next to no
multiprocessors from compute, as a network card that moves data by itself. In each round every arm takes a turn of a few
steps. docs/gpu.md explains the figures.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench_kit import record

if importlib.util.find_spec("ddp_crossover") is None:
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # not installed: measure this checkout

from bench_kit.ranks import Launch, run_check
from gpu_bench_parts import report
from gpu_bench_parts.options import make_cases, parse_args
from gpu_bench_parts.rank import measure
from gpu_bench_parts.settings import CaseSettings

# For starting the process, and for the first steps, in which cuDNN tries its algorithms.
START_S = 60.0


def main(arguments: list[str] | None = None) -> int:
    """Measure all cases; returns 2 if there is no GPU, 1 if a case failed, else 0."""
    args = parse_args(__doc__, arguments)
    console = Console()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_bench: there is no GPU; --device cpu rehearses without one", file=sys.stderr)
        return 2
    result: dict[str, Any] = {"configuration": configuration(args), "cases": []}
    record.show_configuration(result["configuration"])
    failed = False
    for settings in make_cases(args):
        failed |= not run_case(console, settings, args, result)
    return 1 if failed else 0


def run_case(console: Console, settings: CaseSettings, args: argparse.Namespace, result: dict[str, Any]) -> bool:
    """Measure one case in a process of its own, and write the record after each of its rounds; whether it worked."""
    console.print(f"measuring {settings.name}, about {settings.limit_s:.0f} s at most ...", highlight=False)
    cases = result["cases"]
    cases.append({"case": settings.name, "state": "starting"})

    def keep(figures: list[dict[str, Any]]) -> None:
        cases[-1] = figures[0] | {"state": "under way"}
        record.write(result, args.json)

    outcome = run_check(measure, (settings,), launch(args.device), settings.limit_s + START_S, keep)
    cases[-1] = cases[-1] | {"state": outcome.result, "detail": outcome.detail, "seconds": round(outcome.seconds, 1)}
    record.write(result, args.json)
    if cases[-1].get("arms"):
        report.print_case(console, cases[-1], result["configuration"]["wire"])
    if outcome.result != "ok":
        print(f"gpu_bench: {settings.name}: {outcome.detail}", file=sys.stderr)
    return outcome.result == "ok"


def launch(device: str) -> Launch:
    """One rank."""
    if device == "cpu":
        return Launch("gloo", ("cpu",), {"GLOO_SOCKET_IFNAME": "lo"})
    return Launch("nccl", ("cuda:0",), {"NCCL_DEBUG": "WARN"})


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the figures depend on."""
    rehearsal = args.device == "cpu"
    return record.configuration(
        args,
        wire=(
            "REHEARSAL on a CPU: says nothing about a GPU"
            if rehearsal
            else f"EMULATED wire of a ring of {args.ranks} ranks, {args.latency_us:g} us a leg"
        ),
        is_gpu_measurement=not rehearsal,
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        gpu=None if rehearsal else torch.cuda.get_device_name(0),
        all_arms_share=f"{args.optimizer}, gradient_as_bucket_view=True, {args.precision}",
    )


if __name__ == "__main__":
    sys.exit(main())
