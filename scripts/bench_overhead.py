"""Measure the cost of DeAR per step where there is nothing to gain: hooks and waits at world size 1.

    python scripts/bench_overhead.py
    python scripts/bench_overhead.py --optimizer adamw --rounds 20 --json overhead.json

Measures ResNet-50, and MLPs of 250 to 2,000 layers for the growth with the number of parameters. Plain DDP, DeAR and a
default attach() take turns in one process, in rounds of a few steps, so that a slow moment of the machine hits all. The
overhead is the median over rounds of (DeAR - DDP), with a schedule that keeps the pipeline. A default attach() leaves
DDP with one rank alone; its column is the median over rounds of its step time over that of DDP.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from rich.console import Console
from torch import nn

from bench_kit import record
from bench_kit.options import add_results, make_parser, positive_int
from bench_kit.rounds import spread, turns
from bench_kit.tables import print_table
from bench_kit.training import Workload
from bench_parts.arms import OPTIMIZERS, ArmName, make_arm

MLP_LAYERS = (250, 500, 1000, 2000)
ARMS = ("ddp", "dear", "auto")


def workloads(width: int, batch_size: int) -> dict[str, Workload]:
    """ResNet-50 and the MLPs: two parameter tensors a layer, and next to no arithmetic."""

    def mlp(layers: int) -> nn.Module:
        return nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())))

    images, rows = torch.randn(batch_size, 3, 64, 64), torch.randn(batch_size, width)
    mlps = {f"MLP {layers}": _workload(lambda layers=layers: mlp(layers), rows) for layers in MLP_LAYERS}  # type: ignore[misc]
    return {"ResNet-50": _workload(torchvision.models.resnet50, images), **mlps}


def _workload(build: Callable[[], nn.Module], inputs: torch.Tensor) -> Workload:
    return Workload(build, lambda network: network(inputs).square().mean(), lambda network: [])


def measure(workload: Workload, args: argparse.Namespace) -> list[list[float]]:
    """Seconds per step of each round, for each of `ARMS`."""
    arms = [make_arm(ArmName.parse(name), workload, None, args.optimizer) for name in ARMS]
    for arm in arms:
        for _ in range(args.warmup):
            arm.step()
    rounds_s: list[list[float]] = [[] for _ in arms]
    for turn in turns(len(arms), args.rounds):
        rounds_s[turn.index].append(arms[turn.index].turn_s(args.steps))
    for arm in arms:
        arm.close()
    return rounds_s


def summarize(model: str, parameters: int, rounds_s: Sequence[list[float]]) -> dict[str, Any]:
    """Medians, quartiles of the overhead, and the overhead per parameter tensor."""
    ddp_s, dear_s, attached_s = rounds_s
    # One figure per round, from steps that ran right after one another.
    overhead_s = spread([ours - plain for ours, plain in zip(dear_s, ddp_s, strict=True)])
    attached = spread([ours / plain for ours, plain in zip(attached_s, ddp_s, strict=True)])
    return {
        "model": model,
        "parameters": parameters,
        "ddp_ms": 1e3 * statistics.median(ddp_s),
        "dear_ms": 1e3 * statistics.median(dear_s),
        "overhead_ms": 1e3 * overhead_s["median"],
        "overhead_quartiles_ms": [1e3 * overhead_s["low"], 1e3 * overhead_s["high"]],
        "overhead_per_parameter_us": 1e6 * overhead_s["median"] / parameters,
        "attached_over_ddp": attached["median"],
        "attached_over_ddp_quartiles": [attached["low"], attached["high"]],
        "rounds_attached_s": attached_s,
        "rounds_ddp_s": ddp_s,
        "rounds_dear_s": dear_s,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row["overhead_quartiles_ms"]
    return [
        row["model"],
        str(row["parameters"]),
        f"{row['ddp_ms']:.1f}",
        f"{row['dear_ms']:.1f}",
        f"{row['overhead_ms']:.1f} ({low:.1f}..{high:.1f})",
        f"{row['overhead_per_parameter_us']:.1f}",
        f"{row['attached_over_ddp']:.2f}",
    ]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--optimizer", choices=list(OPTIMIZERS), default="sgd", help="SGD is without momentum (%(default)s)")
    add("--rounds", type=positive_int, default=15, help="turns that each of the three takes (%(default)s)")
    add("--steps", type=positive_int, default=3, help="steps per turn (%(default)s)")
    add("--warmup", type=positive_int, default=5, help="steps before the first turn (%(default)s)")
    add("--width", type=positive_int, default=32, help="width of the MLPs (%(default)s)")
    add("--batch-size", type=positive_int, default=2, help="rows, or images of 64 pixels (%(default)s)")
    add("--threads", type=positive_int, default=1, help="threads of torch within an operator (%(default)s)")
    add_results(parser)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the file that `--json` asks for."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    # Gradients of a deep MLP underflow, and denormal numbers would take longer than normal ones.
    torch.set_flush_denormal(True)
    console = Console()
    config = record.configuration(args, torch=torch.__version__, backend="gloo", world_size=1)
    record.show_configuration(config)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    models = []
    for name, workload in workloads(args.width, args.batch_size).items():
        console.print(f"measuring {name} ...")
        tensors = sum(1 for _ in workload.build().parameters())
        models.append(summarize(name, tensors, measure(workload, args)))
    dist.destroy_process_group()
    headings = ["model", "tensors", "DDP ms", "DeAR ms", "extra ms", "us/tensor", "attached/DDP"]
    console.print("\nExtra time per step at world size 1")
    print_table(console, headings, map(_cells, models))
    record.write({"configuration": config, "models": models}, args.json)


if __name__ == "__main__":
    main()
