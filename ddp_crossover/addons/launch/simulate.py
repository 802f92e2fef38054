"""Predict the step time of plain DDP, DeAR and the planned schedule for many ranks.

What it assumes: every rank computes as long as in the profile (weak scaling), has a link of its own of the given speed
in each direction, and sends (n-1)/n of every fusion buffer in each of its two legs. Congestion inside the network, and
ranks that wait for slower ranks, are left out, so at hundreds of ranks the prediction is a lower bound.

How costs besides bytes grow with n is --exchange. With "peer" (ours on gloo) a rank sends n-1 messages in each leg, so
the fixed cost of a leg grows with n and its latency does not; an all-reduce is two legs. With "ring" (NCCL's) slices
go round in n-1 hops, so the latency grows; an all-reduce pays the fixed cost of a leg once.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ddp_crossover.addons.codes.wire import wire_of
from ddp_crossover.fusion import GradientSpec, Schedule
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel
from ddp_crossover.plan.gradient_specs import as_codes
from ddp_crossover.plan.model_profile import ModelProfile
from ddp_crossover.plan.search import CANDIDATES_MB, best_of_sizes

SCHEDULES = (Schedule.ALLREDUCE, Schedule.DEAR, Schedule.AUTO)
LINKS = ("10g", "25g", "100g")
SYNTHETIC = ("uniform", "heavy-end")
WORLD_SIZES = tuple(2**power for power in range(1, 11))

# The synthetic models have as many parameters as ResNet-50, and round compute times.
_NUMEL = 25_600_000
_LAYERS = 64
_FORWARD_S, _BACKWARD_S = 0.05, 0.1
_GROWTH = 1.06  # factor from layer to layer in "heavy-end": the last quarter holds 60% of the parameters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``simulate``."""
    parser.add_argument(
        "--profile",
        default="heavy-end",
        metavar="FILE",
        help="profile.json of a model, or one of two SYNTHETIC models, made up and measured on nothing: 'uniform' (64 "
        "equal layers, 25.6 M fp32 parameters, 0.15 s of compute) or 'heavy-end' (the same with most parameters in "
        "the last layers, as in ResNet-50). Default: heavy-end",
    )
    parser.add_argument(
        "--link",
        choices=LINKS,
        help="TCP at line rate, latencies assumed. Default: the link in the profile, else 10g",
    )
    parser.add_argument(
        "--world-sizes",
        type=_world_sizes,
        default=WORLD_SIZES,
        metavar="N,N,...",
        help="numbers of ranks, comma-separated. Default: 2,4,...,1024",
    )
    parser.add_argument(
        "--schedule",
        choices=[str(schedule) for schedule in SCHEDULES],
        help="predict only this one. Default: all three",
    )
    parser.add_argument(
        "--fusion-mb",
        type=float,
        metavar="MIB",
        help="size of fusion groups. Default: for each schedule and number of ranks the best of 0.25 to 64 MiB",
    )
    parser.add_argument(
        "--int8",
        action="store_true",
        help="send 8-bit codes, made as fast as this machine makes them. Plain all-reduces stay as they are",
    )
    parser.add_argument(
        "--exchange", choices=("peer", "ring"), default="peer", help="how slices travel, see above. Default: peer"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Predict step times and print them; returns the exit status."""
    profile, synthetic = _profile(args.profile)
    link, measured_at = profile.link, profile.world_size
    if args.link is not None or link is None:
        link, measured_at = LinkModel.preset(args.link or LINKS[0]), 2
    schedules = (args.schedule,) if args.schedule else SCHEDULES
    sizes_mb = CANDIDATES_MB if args.fusion_mb is None else (args.fusion_mb,)
    wire = wire_of(torch.int8)
    codes = as_codes(profile.specs, wire)
    codec_s_per_element = wire.codec_s_per_element(torch.device("cpu")) if args.int8 else 0.0
    all_bytes = sum(spec.wire_bytes for spec in (codes if args.int8 else profile.specs))
    rows = []
    for world_size in args.world_sizes:
        scaled = link.at_world_size(world_size, measured_at=measured_at, exchange=args.exchange)
        steps = {}
        for schedule in schedules:
            is_coded = args.int8 and schedule != Schedule.ALLREDUCE
            fusion_mb, step = best_of_sizes(
                codes if is_coded else profile.specs,
                profile.compute,
                scaled,
                world_size,
                schedule,
                fused_all_reduce=args.exchange == "ring",
                candidates_mb=sizes_mb,
                codec_s_per_element=codec_s_per_element if is_coded else 0.0,
            )
            steps[schedule] = {"step_s": step.step_s, "exposed_s": step.exposed_s, "fusion_mb": fusion_mb}
        communication_s = 2 * scaled.leg_s(all_bytes, world_size)
        limit_s = max(profile.compute.compute_s, communication_s)
        rows.append(
            {
                "world_size": world_size,
                "communication_s": communication_s,
                "limit_s": limit_s,
                "schedules": steps,
            }
        )
    report = {
        "profile": args.profile,
        "synthetic": synthetic,
        "parameters": sum(spec.numel for spec in profile.specs),
        "compute_s": profile.compute.compute_s,
        "link": link.to_json(),
        "measured_at": measured_at,
        "exchange": args.exchange,
        "int8": args.int8,
        "predictions": rows,
    }
    if args.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        _print_table(report, schedules)
    return 0


def _print_table(report: dict[str, Any], schedules: tuple[Schedule, ...]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("ranks", justify="right")
    table.add_column("comm. alone", justify="right")
    table.add_column("limit", justify="right")
    for schedule in schedules:
        table.add_column(schedule, justify="right")
    compared = Schedule.ALLREDUCE in schedules and Schedule.AUTO in schedules
    if compared:
        table.add_column("auto is faster by", justify="right")
    for row in report["predictions"]:
        cells = [str(row["world_size"]), f"{row['communication_s'] * 1e3:.1f}", f"{row['limit_s'] * 1e3:.1f}"]
        for schedule in schedules:
            step = row["schedules"][schedule]
            cells.append(f"{step['step_s'] * 1e3:.1f} ({step['fusion_mb']:.2g})")
        if compared:
            gain = row["schedules"]["allreduce"]["step_s"] / row["schedules"]["auto"]["step_s"] - 1
            cells.append(f"{gain:.1%}")
        table.add_row(*cells)
    what = "synthetic model" if report["synthetic"] else "model"
    link = report["link"]
    console = Console(highlight=False)
    console.print(
        f"[bold]Predicted step time in ms[/bold] of {what} {escape(report['profile'])}: "
        f"{report['parameters'] / 1e6:.1f} M parameters, {report['compute_s'] * 1e3:.1f} ms of compute"
    )
    console.print(
        f"Link: {_rate(link['s_per_byte'])}, latency {link['latency_s'] * 1e6:.3g} us, "
        f"{link['per_leg_s'] * 1e6:.3g} us a leg at {report['measured_at']} ranks; exchange: {report['exchange']}"
    )
    console.print(table)
    console.print("In brackets: group size in MiB. Limit: the longer of compute alone and communication alone.")


def _rate(s_per_byte: float) -> str:
    return f"{8e-9 / s_per_byte:.3g} Gb/s" if s_per_byte else "infinitely fast"


def _profile(name: str) -> tuple[ModelProfile, bool]:
    """The named profile, and whether it is synthetic."""
    if name not in SYNTHETIC:
        return ModelProfile.load(Path(name)), False
    weights = [1.0 if name == "uniform" else _GROWTH**layer for layer in range(_LAYERS)]
    numels = [round(_NUMEL * weight / sum(weights)) for weight in weights]
    compute = ComputeProfile(
        use_s=tuple(layer / _LAYERS * _FORWARD_S for layer in range(_LAYERS)),
        arrival_s=tuple((_LAYERS - layer) / _LAYERS * _BACKWARD_S for layer in range(_LAYERS)),
        forward_s=_FORWARD_S,
        backward_s=_BACKWARD_S,
    )
    specs = tuple(GradientSpec(f"layer{layer}", numel, 4, "float32") for layer, numel in enumerate(numels))
    return ModelProfile(specs, compute), True


def _world_sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 2:
        raise argparse.ArgumentTypeError("world sizes start at 2: one rank sends nothing")
    return sizes
