"""Shows what DeAR gains on a slow network, on this machine and without root: plain DDP against DeAR, on real images.

    ./scripts/demo.sh                     # makes the environment, then runs the next line
    torchrun --standalone --nproc-per-node 2 scripts/demo.py

Two processes on the CPU train the same model from the same seed, over a link that the kernel slows down until
communication takes about as long as compute. Ends with a table, one sentence on whether it pays, and a picture.
Exits non-zero if one bit of the trained models differs, or if the link is not as slow as it was asked to be.
"""

import argparse
import contextlib
import gc
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from rich.console import Console

from bench_kit import record
from bench_kit.display import Display
from bench_kit.options import add_results, make_parser, positive_int
from bench_kit.slow_link import PacingError, require_slow, why_not_here
from ddp_crossover.report.timeline import draw
from demo_parts import measure, report
from demo_parts.arms import DemoArm, Factory, Images
from train import build_model

TIMEOUT = timedelta(minutes=5)
ROUNDS_S = 75.0
FIRST_BATCH_SIZE = 32


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    # Few parameters for its compute: what two cores spend on sending hides little of what is shown.
    add("--model", default="mobilenet_v2", help="a torchvision classifier (%(default)s)")
    add("--image-size", type=positive_int, default=64, metavar="PIXELS", help="(%(default)s)")
    add(
        "--batch-size",
        type=positive_int,
        metavar="N",
        help="images per process (so that a step computes for about 0.25 s)",
    )
    add("--rounds", type=positive_int, metavar="N", help="turns of each arm (3 to 8, as many as fit into 75 s)")
    add("--steps", type=positive_int, default=5, metavar="N", help="steps of a turn (%(default)s)")
    add("--quick", action="store_true", help="few steps and no tuning, to try the demo itself: the figures mean little")
    add("--timeline", type=Path, default=Path("timeline.png"), metavar="FILE", help="the picture (%(default)s)")
    add_results(parser)
    args = parser.parse_args(arguments)
    if args.model not in torchvision.models.list_models(module=torchvision.models):
        parser.error(f"--model {args.model} is none of torchvision's classifiers, such as mobilenet_v2")
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 scripts/demo.py")
    return args


class Demo:
    """The demo on one rank. Every method is collective; rank 0 shows what happens."""

    def __init__(self, args: argparse.Namespace, console: Console, display: Display) -> None:
        self._args, self._console, self._display = args, console, display
        self._lengths = measure.QUICK if args.quick else measure.FULL
        self._images = Images(args.image_size, args.batch_size or FIRST_BATCH_SIZE)
        self._factory = Factory(lambda: build_model(args.model, self._images.classes, args.image_size), self._images)
        self._alone = self._factory.compute_alone()
        parameters = list(self._alone.ddp.parameters())
        self._parameters = sum(parameter.numel() for parameter in parameters)
        self._gradient_bytes = sum(parameter.nbytes for parameter in parameters)

    def run(self) -> dict[str, Any]:
        """Everything from the first measurement to the record."""
        link = self._emulate_link()
        default, best, dear = self._arms(link["asked_bytes_per_s"])
        with contextlib.closing(dear.arm):
            arms = report.Arms(default, best, dear, self._alone)
            times_s = self._rounds(arms)
            traced = self._trace(arms)
            self._display.update("comparing the models", 0.98)
            learned = [measure.learned(arm, self._images, self._lengths.traced_steps) for arm in arms.trained]
            comparison = measure.compare(arms.trained)
            if dist.get_rank() == 0:
                self._args.timeline.parent.mkdir(parents=True, exist_ok=True)
                draw([steps.trace for steps in traced], self._args.timeline)
            result = {"link": link} | report.make_record(arms, times_s, traced, learned, comparison)
            dist.barrier()  # a rank that leaves closes the connections of the other
            return result

    def _emulate_link(self) -> dict[str, Any]:
        """Choose a speed at which communication takes as long as compute, and tell both."""
        self._display.update("measuring compute", 0.0)
        if not self._args.batch_size:
            measure.choose_batch_size(self._images, self._alone, self._lengths)
        compute_s = measure.compute_s(self._alone, self._lengths)
        why_not = why_not_here()
        asked = None if why_not else float(f"{self._gradient_bytes / compute_s:.3g}")
        self._display.update("measuring the link", 0.04)
        communication_s = measure.communication_s(self._factory.ddp(None, asked), self._gradient_bytes)
        measured = self._gradient_bytes / communication_s
        link = {
            "why_not": why_not,
            "asked_bytes_per_s": asked,
            "measured_bytes_per_s": measured,
            "compute_s": compute_s,
            "communication_s": communication_s,
        }
        if asked is not None:
            require_slow(asked, measured)
        for line in (
            f"{self._args.model}, {self._parameters / 1e6:.1f} M parameters, on {self._images.batch_size} images of "
            f"{self._args.image_size} pixels per process and step: hand-written digits. 2 processes, gloo, CPU.",
            report.link_sentence(link),
            f"Alone, a step's compute takes {compute_s * 1e3:.0f} ms, and its communication "
            f"{communication_s * 1e3:.0f} ms ({self._gradient_bytes / 1e6:.1f} MB of gradients).",
        ):
            self._console.print(line, highlight=False, soft_wrap=True)
        return link

    def _arms(self, bytes_per_s: float | None) -> tuple[DemoArm, DemoArm, DemoArm]:
        """DDP as it comes, DDP at its best and DeAR, all after equally many steps."""
        default, best = measure.try_bucket_sizes(
            self._factory,
            bytes_per_s,
            self._lengths,
            lambda doing, behind: self._display.update(doing, 0.06 + behind / 10),
        )
        best.label += " (best)"
        self._display.update("DeAR tunes itself while it trains", 0.16)
        dear = self._factory.dear(bytes_per_s, tune=self._lengths.tune)
        dear.arm.warm_up(measure.MOST_TUNING_STEPS)
        steps = max(arm.steps for arm in (default, best, dear))
        for behind, arm in ((0.3, default), (0.4, best), (0.5, dear)):
            self._display.update(f"{arm.label} trains as many steps", behind)
            arm.pace(None)  # nothing is timed now
            arm.catch_up(steps)
            arm.pace(bytes_per_s)
        return default, best, dear

    def _rounds(self, arms: report.Arms) -> list[list[float]]:
        # All objects of now stay alive: the garbage collector need not look through them during a turn.
        gc.collect()
        gc.freeze()
        slowest_s = torch.tensor([arm.arm.turn_s(self._args.steps) for arm in arms.all])
        dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
        round_s = (self._args.steps + 1) * slowest_s.sum().item()
        rounds = self._args.rounds or min(max(int(ROUNDS_S / round_s), 3), 8)
        times_s = measure.time_rounds(
            arms.all, rounds, self._args.steps, lambda doing, behind: self._display.update(doing, 0.55 + 0.35 * behind)
        )
        gc.unfreeze()
        return times_s

    def _trace(self, arms: report.Arms) -> list[measure.Traced]:
        traced = []
        for number, arm in enumerate(arms.trained):
            self._display.update(f"tracing {arm.label}", 0.9 + 0.08 * number / len(arms.trained))
            traced.append(measure.trace_steps(arm, self._lengths.traced_steps))
        return traced


def main() -> int:
    """Run under torchrun, once per rank."""
    args = parse_args()
    logging.getLogger("ddp_crossover").setLevel(logging.ERROR)  # the report says what was tuned and how it ended
    torch.set_flush_denormal(True)  # gradients of a model that has learned everything would slow it down
    dist.init_process_group("gloo", timeout=TIMEOUT)
    is_first = dist.get_rank() == 0
    console = Console(quiet=not is_first)
    try:
        with Display(console, cases=1) as display:
            result = Demo(args, console, display).run()
    except PacingError as error:
        console.print(f"[red]demo.py: error[/]: {error}", highlight=False, soft_wrap=True)
        return int(is_first)  # torchrun ends all ranks at the first that fails: the one that talks must be it
    except ValueError as error:  # a model that such images do not fit
        raise SystemExit(f"demo.py: error: {error}") from error
    finally:
        dist.destroy_process_group()
    report.show(console, result)
    console.print(report.picture_sentence(args.timeline), highlight=False, soft_wrap=True)
    if is_first:
        record.write({"configuration": record.configuration(args, torch=torch.__version__)} | result, args.json)
    return int(is_first and bool(result["comparison"]["first_difference"]))


if __name__ == "__main__":
    sys.exit(main())
