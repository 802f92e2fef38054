"""Does the errand of a process, when its script builds the first DDP model."""

from __future__ import annotations

import atexit
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.comm_hook import DearState
from ddp_crossover.ddp.unwrapping import live_objects
from ddp_crossover.launch.auto import AttachedModel, Auto
from ddp_crossover.launch.errand import Errand
from ddp_crossover.launch.examination import Examination
from ddp_crossover.launch.rank_order_hook import add_in_rank_order, can_add_in_rank_order, has_one_order
from ddp_crossover.launch.training_record import TrainingRecord
from ddp_crossover.launch.watch import BeforeForward
from ddp_crossover.log import say
from ddp_crossover.options import switched_off
from ddp_crossover.top_k import TopK
from ddp_crossover.torch_internals.ddp import has_comm_hook


def start(errand: Errand) -> BeforeForward:
    """Return what is to be called before a training forward of each model."""
    attaches = errand.options is not None and not switched_off()
    auto = Auto(**_arguments(errand.options or {}))
    if attaches:
        auto.begin()
    rank = dist.get_rank()  # not from the environment: the script may start its ranks by itself
    if attaches and rank == 0:
        atexit.register(_tell, auto, errand.stats_file)
    if errand.record is not None:
        return _record(errand, rank, auto, attaches=attaches)
    if errand.examine is not None:
        return _examine(errand, auto, attaches=attaches)
    return auto.before_forward if attaches else lambda ddp: False


def _record(errand: Errand, rank: int, auto: Auto, *, attaches: bool) -> BeforeForward:
    assert errand.record is not None
    recording = TrainingRecord(Path(errand.record), rank, errand.steps, lambda: {"models": _figures(auto)})
    recording.begin()
    atexit.register(recording.write)

    def before_forward(ddp: DistributedDataParallel) -> bool:
        recording.before_forward(ddp)
        recording.note_order(may_round=not (has_one_order(ddp) or can_add_in_rank_order(ddp)))
        if attaches:
            return _attach(auto, ddp)
        recording.note_order(in_rank_order=add_in_rank_order(ddp))
        return False

    return before_forward


def _examine(errand: Errand, auto: Auto, *, attaches: bool) -> BeforeForward:
    assert errand.examine is not None
    examination = Examination(Path(errand.examine), errand.steps, auto, lambda: _figures(auto))

    def before_forward(ddp: DistributedDataParallel) -> bool:
        examination.before_forward(ddp)
        return _attach(auto, ddp) if attaches else False

    return before_forward


def _attach(auto: Auto, ddp: DistributedDataParallel) -> bool:
    """Attach, unless the script has attached by itself: then that is what is looked at."""
    if has_comm_hook(ddp):
        for state in live_objects(DearState):
            if not state.detached and state.module is ddp.module:
                auto.models.append(AttachedModel(type(ddp.module).__name__, state, by_script=True))
    return auto.before_forward(ddp)


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``attach`` for options from JSON: dtypes have names there, and objects fields."""
    made: dict[str, Any] = {}
    if "wire_dtype" in options:
        made["wire_dtype"] = getattr(torch, options["wire_dtype"])
    if "compress" in options:
        made["compress"] = TopK(**options["compress"])
    return options | made


def _figures(auto: Auto) -> list[dict[str, Any]]:
    return [
        {"model": model.name, "by_script": model.by_script, **asdict(stats), "obstacles": stats.obstacles}
        for model in auto.models
        for stats in [model.stats()]
    ]


def _tell(auto: Auto, stats_file: str | None) -> None:
    for model in auto.models:
        say(f"{model.name}: {model.stats()}")
    if stats_file is not None:
        Path(stats_file).write_text(json.dumps(_figures(auto), indent=1) + "\n")
