"""Measure what it costs to watch the first steps of an optimizer.

    python scripts/bench_watching.py
    python scripts/bench_watching.py --rounds 10 --json watching.json

Whether updates may be deferred is known by watching an optimizer's first steps (docs/exactness.md), so each run
attaches anew: to ResNet-50 and to a transformer of six layers, with AdamW, on one rank, with a schedule that keeps the
pipeline. Every other run trains with plain DDP. Nothing is deferred in a step that is watched.
"""

import argparse
import statistics
import time
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torchvision
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from bench_kit import record
from bench_kit.options import add_results, make_parser, names, positive_int
from bench_kit.rounds import spread
from bench_kit.tables import print_table
from ddp_crossover.watching.step_watch import StepWatch


class Steps(NamedTuple):
    """The steps of one run.

    Attributes:
        attach_ms: how long `attach` took, 0 for plain DDP.
        ms: how long each training step took.
        watched: which of them were watched.
    """

    attach_ms: float
    ms: list[float]
    watched: list[bool]


NAMES = ["resnet50", "transformer"]


def models(batch_size: int) -> dict[str, tuple[Any, torch.Tensor]]:
    """What builds each of `NAMES`, and what it is given."""

    def transformer() -> nn.Module:
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    return {
        "resnet50": (torchvision.models.resnet50, torch.randn(batch_size, 3, 64, 64)),
        "transformer": (transformer, torch.randn(batch_size, 32, 256)),
    }


def run(build: Any, inputs: torch.Tensor, steps: int, *, attached: bool) -> Steps:
    """Train a fresh model."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(ddp.parameters())
    begin_s = time.perf_counter()
    state = dx.attach(ddp, optimizer, schedule="dear") if attached else None
    attach_ms = 1e3 * (time.perf_counter() - begin_s) if attached else 0.0
    ms, watched = [], []
    with mock.patch.object(StepWatch, "start", autospec=True, side_effect=StepWatch.start) as starts:
        for _ in range(steps):
            before, begin_s = starts.call_count, time.perf_counter()
            ddp(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ms.append(1e3 * (time.perf_counter() - begin_s))
            watched.append(starts.call_count > before)
    if state is not None:
        state.detach()
    return Steps(attach_ms, ms, watched)


def summarize(model: str, tensors: int, plain: list[Steps], attached: list[Steps]) -> dict[str, Any]:
    """Medians with quartiles; the first two steps of a run, which allocate, count only if they are watched."""
    of_plain = statistics.median(ms for one in plain for ms in one.ms[2:])
    watched = [ms for one in attached for ms, is_watched in zip(one.ms, one.watched, strict=True) if is_watched]
    last = max(number for one in attached for number, is_watched in enumerate(one.watched) if is_watched)
    return {
        "model": model,
        "tensors": tensors,
        "attach_ms": spread([one.attach_ms for one in attached]),
        "plain_ms": of_plain,
        "first_plain_ms": statistics.median(one.ms[0] for one in plain),
        "watched_steps": statistics.median(sum(one.watched) for one in attached),
        "watched_ms": spread(watched),
        "later_ms": spread([ms for one in attached for ms in one.ms[last + 3 :]]),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    def of(key: str) -> str:
        return f"{row[key]['median']:.0f} ({row[key]['low']:.0f}..{row[key]['high']:.0f})"

    return [
        row["model"],
        str(row["tensors"]),
        of("attach_ms"),
        f"{row['first_plain_ms']:.0f}",
        f"{row['plain_ms']:.0f}",
        f"{row['watched_steps']:.0f}",
        of("watched_ms"),
        of("later_ms"),
    ]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--models", type=names(NAMES), default=NAMES, metavar="NAME,...", help=f"of {', '.join(NAMES)} (all)")
    add("--rounds", type=positive_int, default=5, help="runs of each kind (%(default)s)")
    add("--steps", type=positive_int, default=16, help="steps of a run (%(default)s)")
    add("--batch-size", type=positive_int, default=2, help="images of 64 pixels, or sequences of 32 (%(default)s)")
    add_results(parser)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the file that `--json` asks for."""
    args = parse_args()
    torch.set_num_threads(1)
    console = Console()
    config = record.configuration(args, torch=torch.__version__, backend="gloo", world_size=1)
    record.show_configuration(config)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    of_name = models(args.batch_size)
    for name in args.models:
        build, inputs = of_name[name]
        console.print(f"measuring {name} ...")
        plain, attached = [], []
        for _ in range(args.rounds):
            plain.append(run(build, inputs, args.steps, attached=False))
            attached.append(run(build, inputs, args.steps, attached=True))
        rows.append(summarize(name, sum(1 for _ in build().parameters()), plain, attached))
    dist.destroy_process_group()
    headings = ["model", "tensors", "attach", "DDP, first step", "later", "watched steps", "each", "after them"]
    console.print("\nMilliseconds, medians with quartiles")
    print_table(console, headings, map(_cells, rows))
    record.write({"configuration": config, "models": rows}, args.json)


if __name__ == "__main__":
    main()
