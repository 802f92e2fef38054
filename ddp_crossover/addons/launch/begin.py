"""Begins the errand of a process as soon as torch's DDP module has been imported.

Imports no torch at the top: it is loaded while torch itself is being imported.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from typing import TYPE_CHECKING

from ddp_crossover.addons.launch.errand import SEED, errand_of_process
from ddp_crossover.addons.launch.watch import BeforeForward, watch_new_models

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def run_errand(ddp_class: type[DistributedDataParallel]) -> None:
    """Do what this process was asked to do, once a DDP model is built; say so at its end if none was."""
    errand = errand_of_process()
    if errand is None:
        return
    if errand.is_seeded:
        from torch._C import default_generator  # torch.manual_seed() is not there yet

        default_generator.manual_seed(SEED)
    watch_new_models(ddp_class, _start)
    atexit.register(_say_if_none_was_built, is_recorded=errand.recorded_for is not None)


@functools.cache
def _start() -> BeforeForward:
    # Here, because torch has been imported only now.
    from ddp_crossover.addons.launch.start import start

    errand = errand_of_process()
    assert errand is not None
    return start(errand)


def _say_if_none_was_built(*, is_recorded: bool) -> None:
    started = os.environ.get("WORLD_SIZE", "1")
    if _start.cache_info().currsize or started == "1" or os.environ.get("RANK") != "0":
        return
    # Here, because torch has been imported only now.
    from ddp_crossover.log import say
    from ddp_crossover.options import switched_off
    from ddp_crossover.torch_internals.optimizers import was_any_built

    # A worker of a data loader builds none. In verify and doctor a plain run is one that is switched off.
    if was_any_built() and (is_recorded or not switched_off()):
        say(
            f"nothing is attached to: {started} processes were started, and this one has built an optimizer and no "
            "DistributedDataParallel, so each trains on its own, unless the script averages gradients by itself. Wrap "
            "the model: DistributedDataParallel(model)",
            logging.WARNING,
        )
