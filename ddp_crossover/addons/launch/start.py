"""Does the errand of a process, when its script builds the first DDP model."""

from __future__ import annotations

import atexit
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.addons.launch.auto import AttachedModel, Auto
from ddp_crossover.addons.launch.errand import Errand
from ddp_crossover.addons.launch.examination import Examination
from ddp_crossover.addons.launch.process_moments import PROCESS_MOMENTS
from ddp_crossover.addons.launch.training_record import TrainingRecord
from ddp_crossover.addons.launch.watch import BeforeForward
from ddp_crossover.comm_hook import DearState
from ddp_crossover.hook.unwrapping import live_objects
from ddp_crossover.log import say
from ddp_crossover.options import switched_off
from ddp_crossover.top_k import TopK
from ddp_crossover.torch_internals.ddp import has_comm_hook


def start(errand: Errand) -> BeforeForward:
    """Return what is to be called before a training forward of each model."""
    auto: Auto | None = None
    if errand.options is not None and not switched_off():
        auto = Auto(**_arguments(errand.options))
        auto.begin()
        if dist.get_rank() == 0:  # not from the environment: the script may start its ranks by itself
            atexit.register(_tell, auto, errand.stats_file)
    if errand.recorded_for is None:
        return auto.before_forward if auto is not None else lambda ddp: False
    record = TrainingRecord(errand, auto) if errand.recorded_for == "verify" else Examination(errand, auto)
    PROCESS_MOMENTS.follow(record)

    def before_forward(ddp: DistributedDataParallel) -> bool:
        PROCESS_MOMENTS.followers.forward_begins(ddp)
        return auto is not None and _attach(auto, ddp)

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


def _tell(auto: Auto, stats_file: str | None) -> None:
    for model in auto.models:
        say(f"{model.name}: {model.stats()}")
    if stats_file is not None:
        Path(stats_file).write_text(json.dumps([model.figures() for model in auto.models], indent=1) + "\n")
