"""The demo on one rank: what follows on what."""

import argparse
import contextlib
import gc
import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from bench_kit import record
from bench_kit.slow_link import PacingError, require_slow, why_not_here
from demo_parts import measure, picture, report
from demo_parts.arms import DemoArm, Factory, Images
from demo_parts.progress import Progress
from train import build_model

TIMEOUT = timedelta(minutes=5)
FIRST_BATCH_SIZE = 16
ROUNDS = (3, 8)
# To compare the models and to draw.
LAST_S = 6.0


def conduct(args: argparse.Namespace, started_s: float) -> int:
    """Everything on one of two ranks, of a command that was given at `started_s` by `time.time()`: its exit code."""
    logging.getLogger("ddp_crossover").setLevel(logging.ERROR)  # the report says what was tuned and how it ended
    torch.set_flush_denormal(True)  # gradients of a model that has learned everything would slow it down
    dist.init_process_group("gloo", timeout=TIMEOUT)
    is_first = dist.get_rank() == 0
    console = Console(quiet=not is_first)
    lengths = measure.QUICK if args.quick else measure.FULL if args.full else measure.SHORT
    try:
        with Progress(console, started_s, started_s + lengths.end_s) as progress:
            result = Demo(args, lengths, console, progress).run()
    except PacingError as error:
        report.tell(console, f"[red]demo: error[/]: {error}")
        return int(is_first)  # torchrun ends all ranks at the first that fails: the one that talks must be it
    except ValueError as error:  # a model that such images do not fit
        raise SystemExit(f"demo: error: {error}") from error
    finally:
        dist.destroy_process_group()
    report.show(console, result)
    seconds = time.time() - started_s
    report.tell(console, f"The picture, after {seconds:.0f} s: {args.picture}")
    if is_first:
        facts = {"torch": torch.__version__, "seconds": seconds}
        record.write({"configuration": record.configuration(args, **facts)} | result, args.json)
    return int(is_first and bool(result["comparison"]["first_difference"]))


class Demo:
    """The demo on one rank. Every method is collective; rank 0 shows what happens."""

    def __init__(
        self, args: argparse.Namespace, lengths: measure.Lengths, console: Console, progress: Progress
    ) -> None:
        self._args, self._lengths, self._console, self._progress = args, lengths, console, progress
        self._images = Images(args.image_size, args.batch_size or FIRST_BATCH_SIZE)
        self._factory = Factory(lambda: build_model(args.model, self._images.classes, args.image_size), self._images)
        self._alone = self._factory.compute_alone()
        parameters = list(self._alone.ddp.parameters())
        self._parameters = sum(parameter.numel() for parameter in parameters)
        self._gradient_bytes = sum(parameter.nbytes for parameter in parameters)

    def run(self) -> dict[str, Any]:
        """Everything from the first measurement to the record."""
        link = self._emulate_link()
        plain, dear = self._make_arms(link["asked_bytes_per_s"])
        with contextlib.closing(dear.arm):
            arms = self._first_rounds(plain, dear)
            self._catch_up(arms, link["asked_bytes_per_s"])
            times_s = self._rounds(arms)
            traced = self._trace(arms)
            self._progress.doing("comparing the models")
            losses = [measure.last_loss(arm, self._lengths.traced_steps) for arm in arms.trained]
            comparison = measure.compare(arms.trained)
            result = {"link": link} | report.make_record(arms, times_s, traced, losses, comparison)
            self._draw(result["arms"], f"medians and quartiles of {len(times_s[0])} rounds", traced)
            return result

    def _emulate_link(self) -> dict[str, Any]:
        """Choose a speed at which communication takes as long as compute, and tell both."""
        self._progress.doing("measuring compute")
        if not self._args.batch_size:
            measure.choose_batch_size(self._images, self._alone, self._lengths)
        compute_s = measure.compute_s(self._alone, self._lengths.compute_turns)
        why_not = why_not_here()
        asked = None if why_not else float(f"{self._gradient_bytes / compute_s:.3g}")
        self._progress.doing("measuring the link")
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
        ddp_s = compute_s + communication_s  # at most
        rounds = self._args.rounds or ROUNDS[0]
        self._progress.takes_at_least(
            measure.least_s(self._lengths, self._args.steps, rounds, ddp_s, compute_s) + LAST_S
        )
        for line in (
            f"{self._args.model}, {self._parameters / 1e6:.1f} M parameters, {self._images.batch_size} images of "
            f"{self._args.image_size} pixels per process and step: hand-written digits. 2 processes, gloo, CPU.",
            report.link_sentence(link),
            f"Alone, a step's compute takes {compute_s * 1e3:.0f} ms, and its communication "
            f"{communication_s * 1e3:.0f} ms ({self._gradient_bytes / 1e6:.1f} MB of gradients).",
        ):
            report.tell(self._console, line)
        return link

    def _make_arms(self, bytes_per_s: float | None) -> tuple[list[DemoArm], DemoArm]:
        """DDP with each bucket size, and DeAR, all warm."""
        plain = []
        for bucket_mb in self._lengths.buckets_mb:
            arm = self._factory.ddp(bucket_mb, bytes_per_s)
            self._progress.doing(f"warming up: {arm.label}")
            arm.catch_up(measure.WARM_UP_STEPS)
            plain.append(arm)
        doing = "tunes itself while it trains" if self._lengths.tune else "measures, and plans groups"
        self._progress.doing(f"warming up: DeAR {doing}")
        dear = self._factory.dear(bytes_per_s, tune=self._lengths.tune)
        dear.arm.warm_up(measure.MOST_TUNING_STEPS)
        return plain, dear

    def _first_rounds(self, plain: list[DemoArm], dear: DemoArm) -> report.Arms:
        """A few rounds of all: which bucket size is DDP's best, and the first picture."""
        candidates = [*plain, dear, self._alone]
        rounds = self._lengths.first_rounds
        with _no_garbage_collection():
            times_s = measure.time_rounds(candidates, rounds, self._args.steps, self._progress.doing)
        best = plain[measure.fastest(times_s[: len(plain)])]
        arms = report.Arms(plain[0], best, dear, self._alone)
        rows = report.rows(arms, [times_s[candidates.index(arm)] for arm in arms.all], report.whole_range)
        how = f"first {rounds} rounds, lowest to highest"
        self._draw(rows, how, [])
        report.tell(self._console, f"First picture, {how}: {self._args.picture}. So far, {report.so_far(rows)}.")
        return arms

    def _catch_up(self, arms: report.Arms, bytes_per_s: float | None) -> None:
        """Have all models trained equally many steps."""
        steps = max(arm.steps for arm in arms.trained)
        for arm in arms.trained:
            if arm.steps < steps:
                self._progress.doing(f"{arm.label} trains as many steps as the others")
                arm.pace(None)  # nothing is timed now
                arm.catch_up(steps)
                arm.pace(bytes_per_s)

    def _rounds(self, arms: report.Arms) -> list[list[float]]:
        with _no_garbage_collection():
            slowest_s = torch.tensor([arm.arm.turn_s(self._args.steps) for arm in arms.all])
            left_s = torch.tensor(self._progress.left_s())
            dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
            dist.broadcast(left_s, 0)
            round_s = (self._args.steps + 1) * slowest_s.sum().item()
            trace_s = (self._lengths.traced_steps + 2) * slowest_s[:-1].sum().item()
            least, most = ROUNDS
            there_is_time_for = int((left_s.item() - trace_s - LAST_S) / round_s)
            rounds = self._args.rounds or min(max(there_is_time_for, least), most)
            self._progress.ends_in(rounds * round_s + trace_s + LAST_S)
            return measure.time_rounds(arms.all, rounds, self._args.steps, self._progress.doing)

    def _trace(self, arms: report.Arms) -> list[measure.Traced]:
        traced = []
        for arm in arms.trained:
            self._progress.doing(f"tracing {arm.label}")
            traced.append(measure.trace_steps(arm, self._lengths.traced_steps))
        return traced

    def _draw(self, rows: list[dict[str, Any]], how: str, traced: list[measure.Traced]) -> None:
        self._progress.doing("drawing")
        if dist.get_rank() == 0:
            picture.draw(rows, how, [steps.trace for steps in traced], self._args.picture)
        dist.barrier()  # also, a rank that leaves closes the connections of the other


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """All objects of now stay alive: the garbage collector need not look through them during a turn."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
