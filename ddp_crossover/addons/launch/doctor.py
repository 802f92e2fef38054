"""Measure link and compute, and say in words whether dear_hook pays here, how much, and why.

  torchrun --nproc-per-node 2 -m ddp_crossover doctor                           # the link, and known models
  torchrun --nproc-per-node 2 -m ddp_crossover doctor train.py --epochs 10      # your script

Start it as you start your training, on all machines. It measures the link between the ranks; runs the script three
times for some steps, plain, attached and plain again; and names the lines of the script that cost overlap. Nothing is
touched: each run is on a throw-away copy of all files, where Linux allows it. Where these lines prevent the overlap,
and for known models, the step time with dear_hook is predicted from measured compute times and the measured link, as if
nothing else used link and processors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import ddp_crossover
from ddp_crossover.addons.codes.choice import compiled
from ddp_crossover.addons.codes.wire import wire_of
from ddp_crossover.addons.launch.diagnosis import (
    StepTime,
    about_connections,
    about_int8,
    about_numba,
    about_plain_overlap,
    about_slow_ranks,
    costs,
    duration,
    predict,
    verdict,
)
from ddp_crossover.addons.launch.errand import Errand
from ddp_crossover.addons.launch.examination import FEWEST_STEPS
from ddp_crossover.addons.launch.meeting import Meeting
from ddp_crossover.addons.launch.pairs import MeasuredPair, measure_pairs
from ddp_crossover.addons.launch.run import add_norms_argument, add_script_arguments, script_of
from ddp_crossover.addons.launch.script_run import ThreeRuns, add_run_arguments, three_runs
from ddp_crossover.comm.agreement import all_gather_json
from ddp_crossover.fusion import GradientSpec
from ddp_crossover.log import short
from ddp_crossover.nccl.make_link import make_link
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel
from ddp_crossover.plan.ddp_buckets import DEFAULT_BUCKET_MB
from ddp_crossover.plan.link_probe import probe_link
from ddp_crossover.plan.model_profile import ModelProfile

_TIMEOUT = timedelta(minutes=10)
# Share of steps that must overlap for their times to be those that a script can have.
_MOSTLY = 0.5
# Parameters in millions; the size is what counts, and names help to find one's own.
_KNOWN_MODELS = {"ResNet-50": 25.6, "BERT-base, GPT-2": 110.0, "GPT-2 medium": 355.0}
_KNOWN_COMPUTE_S = (0.1, 0.3, 1.0)
_LAYERS = 48
# So many connections to each peer are tried beside one.
_SEVERAL = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``doctor``."""
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="optimizer steps to run. Default: 30")
    add_norms_argument(parser)
    add_run_arguments(parser)
    add_script_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, predict and print on rank 0; 0 if that worked, whatever the verdict."""
    if not os.environ.get("RANK"):
        raise ValueError(
            "the doctor examines the ranks of a training job: start it as you start that, as in "
            "'torchrun --nproc-per-node 2 -m ddp_crossover doctor', on all machines"
        )
    command = script_of(args) if args.script else None
    meeting = Meeting()
    if meeting.rank == 0:
        print("doctor: measuring the link ...", file=sys.stderr, flush=True)
    pairs, link, several = _measure_link(meeting)
    if command is None:
        report = _known_models(link, int(os.environ["WORLD_SIZE"]))
    else:
        options = {"tune": False, **({"norms": args.norms} if args.norms else {})}
        errand = Errand(options=options, recorded_for="doctor", steps=max(args.steps, FEWEST_STEPS))
        with three_runs(command, errand, meeting, args) as runs:
            report = _report_on(runs, args) if meeting.rank == 0 else {}
        report["unsynchronized"] = runs.unsynchronized
    if meeting.rank == 0:
        of_script = LinkModel.from_json(report["attached_link"]) if report.get("attached_by_script") else None
        report["connections"] = None if several is None else about_connections(link, several, _SEVERAL, of_script)
        measured = {"pairs": [asdict(pair) for pair in pairs], "link": link.to_json()}
        report = {"versions": _versions(), **measured, **report}
        print(json.dumps(report, indent=1) if args.json else _in_words(report, pairs))
    return 0


def _versions() -> dict[str, str | None]:
    """Of what an answer to a report of an error depends on."""
    return {
        "ddp_crossover": ddp_crossover.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _measure_link(meeting: Meeting) -> tuple[list[MeasuredPair], LinkModel, LinkModel | None]:
    """All pairs of ranks, the link as legs see it, and on gloo with several connections; on a group of its own."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    meeting.init_process_group("nccl" if has_gpu else "gloo", _TIMEOUT)
    try:
        group = dist.group.WORLD
        assert group is not None
        of_ranks = all_gather_json([asdict(pair) for pair in measure_pairs(device)], group, device)
        pairs = [MeasuredPair(tuple(pair.pop("ranks")), **pair) for of_rank in of_ranks for pair in of_rank]
        if dist.get_world_size() == 1:
            return pairs, LinkModel(0.0, 0.0, 0.0), None
        several = None if has_gpu else _probed(group, device, _SEVERAL)
        return pairs, _probed(group, device, 1), several
    finally:
        dist.destroy_process_group()


def _probed(group: dist.ProcessGroup, device: torch.device, connections: int) -> LinkModel:
    link = make_link(group, device, _TIMEOUT, connections=connections)
    try:
        return probe_link(link, 16 * 2**20, device)
    finally:
        link.close()


def _report_on(runs: ThreeRuns, args: argparse.Namespace) -> dict[str, Any]:
    files = [of_run[0] for of_run in runs.records]  # of rank 0
    plain, attached, again = (json.loads(file.read_text()) for file in files)
    models = attached["models"]
    if not models:
        return {"verdict": f"Not possible as the script is: {runs.why_not_attached.rstrip('.')}."}
    if not models[0]["has_profile"]:
        return {"verdict": f"Nothing to gain: {models[0]['why']}"}
    profile = ModelProfile.load(files[1].with_suffix(".profile"))
    if profile.link is None:
        return {"verdict": "Not worth it: with one rank nothing is sent."}
    steps = max(model["finished_steps"] for model in models)
    overlaps = sum(model["overlapped_steps"] for model in models) > _MOSTLY * steps * len(models)
    times_s = [found["steps_s"] for found in (plain, again)]
    drift = max(map(median, times_s)) / min(map(median, times_s))
    plain_time = StepTime.of(*times_s)
    prediction = predict(
        profile,
        plain["bucket_cap_mb"],
        plain_time,
        StepTime.of(attached["steps_s"], drift=drift) if overlaps and not models[0]["is_tuned"] else None,
        _int8_s_per_element(),
    )
    int8 = about_int8(prediction)
    obstacles = {what: times for model in models for what, times in model["obstacles"].items()}
    advice = {what: advice for model in models for what, advice in model["advice"].items()}
    script = " ".join([*(["-m"] if args.is_module else []), *args.script[:1]])
    by_script = models[0]["by_script"]
    use = f"Use: torchrun ... -m ddp_crossover run {script} ..., or dx.attach(ddp, optimizer) in it"
    # What costs overlap is counted in steps that could overlap, if there were any.
    counted = max(model["pipelined_iterations"] or model["iterations"] for model in models)
    return {
        "prediction": prediction.as_dict(),
        "obstacles": obstacles,
        "advice": advice,
        "steps": counted,
        "attached_by_script": by_script,
        "attached_link": profile.link.to_json(),
        "int8": int8,
        "numba": about_numba(int8, is_there=int8 is not None and bool(compiled())),
        # On CPUs backward and all-reduces share the cores, so how much is hidden says nothing about DDP.
        "plain_overlap": about_plain_overlap(prediction, plain_time) if torch.cuda.is_available() else None,
        "slow_ranks": about_slow_ranks(profile.rank_compute_s, plain_time),
        "rank_compute_s": profile.rank_compute_s,
        # Where nothing is to be gained, nothing needs a way out.
        "costs": costs(obstacles, advice, counted, args.norms) if prediction.may_pay else [],
        "verdict": verdict(prediction, obstacles, counted, "The script has it already." if by_script else use),
    }


def _int8_s_per_element() -> float | None:
    return None if torch.cuda.is_available() else wire_of(torch.int8).codec_s_per_element(torch.device("cpu"))


def _known_models(link: LinkModel, world_size: int) -> dict[str, Any]:
    if world_size == 1:
        return {"verdict": "Not worth it: with one rank nothing is sent."}
    rows = []
    int8_s_per_element = _int8_s_per_element()
    for name, millions in _KNOWN_MODELS.items():
        for compute_s in _KNOWN_COMPUTE_S:
            profile = _uniform(millions * 1e6, compute_s, link, world_size)
            prediction = predict(profile, DEFAULT_BUCKET_MB, int8_s_per_element=int8_s_per_element)
            rows.append({"model": name, "parameters_m": millions, **prediction.as_dict()})
    best = max(rows, key=lambda row: row["gain"])
    text = (
        f"The most to gain of these is {1 + best['gain']:.2f} times ({best['model']}, {best['compute_s'] * 1e3:.0f} ms)"
    )
    return {"known_models": rows, "verdict": f"{text}. Give your script for a verdict on it."}


def _uniform(numel: float, compute_s: float, link: LinkModel, world_size: int) -> ModelProfile:
    """A model of equal layers in fp32 whose backward takes twice as long as its forward."""
    specs = tuple(GradientSpec(f"layer{i}", round(numel / _LAYERS), 4, "float32") for i in range(_LAYERS))
    forward_s, backward_s = compute_s / 3, compute_s * 2 / 3
    compute = ComputeProfile(
        use_s=tuple(i / _LAYERS * forward_s for i in range(_LAYERS)),
        arrival_s=tuple((_LAYERS - i) / _LAYERS * backward_s for i in range(_LAYERS)),
        forward_s=forward_s,
        backward_s=backward_s,
    )
    return ModelProfile(specs, compute, link, world_size)


def _in_words(report: dict[str, Any], pairs: list[MeasuredPair]) -> str:
    lines = []
    if pairs:
        slowest = min(pairs, key=lambda pair: pair.bytes_per_s)
        latency = max(pairs, key=lambda pair: pair.latency_s)
        speed, longest = f"{short(8e-9 * slowest.bytes_per_s)} Gb/s", duration(latency.latency_s)
        if len(pairs) == 1:
            lines.append(f"Link: {speed} between the two ranks; the latency is {longest}.")
        else:
            lines.append(
                f"Link: the slowest of {len(pairs)} pairs of ranks is {slowest.ranks[0]}-{slowest.ranks[1]}, with "
                f"{speed}; the longest latency is {longest}, between {latency.ranks[0]} and {latency.ranks[1]}."
            )
    for row in report.get("known_models", ()):
        lines.append(
            f"  {row['model']} ({row['parameters_m']:g} M parameters), {row['compute_s'] * 1e3:.0f} ms of compute: "
            f"{row['ours_s'] * 1e3:.0f} ms a step instead of {row['plain_s'] * 1e3:.0f} ({1 + row['gain']:.2f} times)"
            + ("" if row["int8_s"] is None else f", {row['int8_s'] * 1e3:.0f} with wire_dtype=torch.int8")
        )
    if report.get("attached_by_script"):
        lines.append("The script attaches by itself; plain is with DDP_CROSSOVER=off.")
    lines += [*report.get("costs", ()), report["verdict"]]
    remarks = ("connections", "int8", "numba", "plain_overlap", "slow_ranks", "unsynchronized")
    return "\n".join([*lines, *filter(None, (report.get(what) for what in remarks))])
