"""Measure the cost of DeAR per step where there is nothing to gain: hooks and waits at world size 1.

    python scripts/bench_overhead.py
    python scripts/bench_overhead.py --optimizer adamw --rounds 20 --json overhead.json

Measures ResNet-50, a 1,000-layer MLP, and MLPs of 250 to 2,000 layers for the growth with the
number of parameters. Plain DDP, DeAR and a default attach() take turns in one process, in rounds of a
few steps, so that a slow moment of the machine hits all. The overhead is the median over rounds of
(DeAR - DDP), with a schedule that keeps the pipeline. A default attach() leaves DDP with one rank alone;
its column is the median over rounds of its step time over that of DDP.
"""

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from bench_kit import record
from bench_kit.options import add_results, make_parser, positive_int
from bench_kit.rounds import spread, turns

SCALING_LAYERS = (250, 500, 1000, 2000)
# The growth counts as linear up to this exponent: timings of a shared machine do not resolve less.
LINEAR_UP_TO = 1.1


class Case(NamedTuple):
    """A model to measure, and one batch for it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: torch.Tensor


class Measurement(NamedTuple):
    """Seconds per step of each round, plain DDP, DeAR and a default attach() side by side."""

    name: str
    parameters: int
    ddp_s: np.ndarray
    dear_s: np.ndarray
    attached_s: np.ndarray

    @property
    def overheads_s(self) -> np.ndarray:
        """One figure per round, from steps that ran right after one another."""
        return self.dear_s - self.ddp_s

    def summary(self) -> dict[str, Any]:
        """Medians, quartiles of the overhead, and the overhead per parameter tensor."""
        overhead_s = spread(self.overheads_s.tolist())
        attached = spread((self.attached_s / self.ddp_s).tolist())
        return {
            "model": self.name,
            "parameters": self.parameters,
            "ddp_ms": 1e3 * statistics.median(self.ddp_s),
            "dear_ms": 1e3 * statistics.median(self.dear_s),
            "overhead_ms": 1e3 * overhead_s["median"],
            "overhead_quartiles_ms": [1e3 * overhead_s["low"], 1e3 * overhead_s["high"]],
            "overhead_per_parameter_us": 1e6 * overhead_s["median"] / self.parameters,
            "attached_over_ddp": attached["median"],
            "attached_over_ddp_quartiles": [attached["low"], attached["high"]],
            "rounds_attached_s": self.attached_s.tolist(),
            "rounds_ddp_s": self.ddp_s.tolist(),
            "rounds_dear_s": self.dear_s.tolist(),
        }


def mlp(layers: int, width: int) -> nn.Module:
    """`layers` times Linear and ReLU: two parameter tensors a layer, and next to no arithmetic."""
    return nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())))


def cases(width: int, batch_size: int) -> list[Case]:
    """ResNet-50 and the MLPs; the 1,000-layer one is among those for the growth."""
    images = torch.randn(batch_size, 3, 64, 64)
    rows = torch.randn(batch_size, width)
    mlps = [Case(f"MLP {n}", lambda n=n: mlp(n, width), rows) for n in SCALING_LAYERS]
    return [Case("ResNet-50", torchvision.models.resnet50, images), *mlps]


def make_step(case: Case, optimizer_name: str, hook: str, stack: contextlib.ExitStack) -> Callable[[], None]:
    """A function that runs one training step of this model, with its own weights and optimizer."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(case.build(), gradient_as_bucket_view=True)
    if optimizer_name == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    if hook == "dear":
        state = dx.DearState(ddp, optimizer, schedule="dear")  # with "auto", DDP with one rank is left alone
        ddp.register_comm_hook(state, dx.dear_hook)
        stack.callback(state.detach)
    elif hook == "attached":
        dx.attach(ddp, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        ddp(case.inputs).square().mean().backward()
        optimizer.step()

    return step


def seconds_per_step(step: Callable[[], None], steps: int) -> float:
    """Mean over a turn. DeAR applies each update one step later, so a turn of it has `steps` updates, too."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def measure(case: Case, args: argparse.Namespace) -> Measurement:
    """Warm all up, then let them take turns; the one that goes first alternates."""
    rounds: dict[str, list[float]] = {"none": [], "dear": [], "attached": []}
    with contextlib.ExitStack() as stack:
        steps = {hook: make_step(case, args.optimizer, hook, stack) for hook in rounds}
        for step in steps.values():
            seconds_per_step(step, args.warmup)
        for turn in turns(len(steps), args.rounds):
            hook = list(steps)[turn.index]
            rounds[hook].append(seconds_per_step(steps[hook], args.steps))
    parameters = sum(1 for _ in case.build().parameters())
    return Measurement(case.name, parameters, *(np.array(rounds[hook]) for hook in ("none", "dear", "attached")))


def growth(measurements: list[Measurement]) -> dict[str, Any]:
    """Exponent k of overhead ~ parameters^k, by least squares in the logarithms.

    Its 95% interval comes from 1,000 bootstrap samples of the rounds.
    """
    log_parameters = np.log([m.parameters for m in measurements])

    def exponent(overheads_s: list[np.ndarray]) -> float:
        medians = [np.median(rounds) for rounds in overheads_s]
        if min(medians) <= 0:
            return math.nan
        return float(np.polyfit(log_parameters, np.log(medians), 1)[0])

    measured = [m.overheads_s for m in measurements]
    random = np.random.default_rng(0)
    samples = [exponent([random.choice(rounds, rounds.size) for rounds in measured]) for _ in range(1000)]
    low, high = np.quantile(samples, (0.025, 0.975))
    if math.isnan(low):
        verdict = "not decided: the overhead is within the noise; give more --rounds or --steps"
    elif high <= LINEAR_UP_TO:
        verdict = "at most linear"
    elif low > LINEAR_UP_TO:
        verdict = "faster than linear"
    else:
        verdict = "not decided: the interval is too wide; give more --rounds or --steps"
    return {
        "exponent": exponent(measured),
        "interval_95": [float(low), float(high)],
        "verdict": verdict,
    }


def print_results(console: Console, summaries: list[dict[str, Any]], fit: dict[str, Any]) -> None:
    """One row a model, and the growth."""
    table = Table(title="Extra time per step at world size 1", title_justify="left", box=box.SIMPLE)
    table.add_column("model", no_wrap=True)
    for heading in ("tensors", "DDP ms", "DeAR ms", "extra ms", "us/tensor", "attached/DDP"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summaries:
        low, high = row["overhead_quartiles_ms"]
        table.add_row(
            row["model"], str(row["parameters"]), f"{row['ddp_ms']:.1f}", f"{row['dear_ms']:.1f}",
            f"{row['overhead_ms']:.1f} ({low:.1f}..{high:.1f})", f"{row['overhead_per_parameter_us']:.1f}",
            f"{row['attached_over_ddp']:.2f}",
        )  # fmt: skip
    console.print(table)
    low, high = fit["interval_95"]
    console.print(
        f"growth of the MLPs' overhead with the number of their parameter tensors: exponent "
        f"{fit['exponent']:.2f} (95%: {low:.2f} to {high:.2f}), {fit['verdict']}"
    )


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--optimizer", choices=("sgd", "adamw"), default="sgd", help="SGD is without momentum (%(default)s)")
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
    measurements = []
    for case in cases(args.width, args.batch_size):
        console.print(f"measuring {case.name} ...")
        measurements.append(measure(case, args))
    dist.destroy_process_group()

    summaries = [m.summary() for m in measurements]
    fit = growth([m for m in measurements if m.name.startswith("MLP")])
    print_results(console, summaries, fit)
    record.write({"configuration": config, "models": summaries, "growth": fit}, args.json)


if __name__ == "__main__":
    main()
