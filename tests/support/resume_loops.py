"""Training loops that save, throw everything away, load and go on."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from equivalence import Run, plain_loop, train_step

# In the middle of a run of so many: both parts are pipelined for half of their steps or more.
STEPS = 13
RESUME_AT = 5


def resume(run: Run, after: str, restart: Callable[[Run], None] | None = None) -> Iterator[Any]:
    """Restart the script once, after the "forward", the "backward" or the "step" of one iteration.

    What an iteration lost by that is repeated by the restarted script.
    """
    restart = restart or through_state_dicts
    run.attach()
    for index in range(run.case.steps):
        x, y = run.batch(index)
        if index == RESUME_AT and after != "step":
            loss = run.loss(run.model(x), y)
            if after == "backward":
                loss.backward()
            restart(run)
        loss = train_step(run, x, y)
        if index == RESUME_AT and after == "step":
            restart(run)
        yield loss


def never_interrupted(run: Run) -> Iterator[Any]:
    """DeAR's arm is restarted, the reference is not: a resumed run is one that was never stopped."""
    if run.with_dear:
        yield from resume(run, "step")
    else:
        yield from plain_loop(run)


def through_state_dicts(run: Run) -> None:
    """`torch.save` of both state dicts, loaded before attach."""
    saved = _through_file({"model": run.model.state_dict(), "optimizer": run.optimizer_state()})
    run.build()
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.attach()


def through_state_dicts_after_attach(run: Run) -> None:
    """Of the bare module, loaded after attach, the optimizer first both times."""
    saved_optimizer = _through_file(run.optimizer_state())
    saved_model = _through_file(run.model.module.state_dict())
    run.build()
    run.attach()
    run.optimizer.load_state_dict(saved_optimizer)
    run.model.module.load_state_dict(saved_model)


def through_get_state_dict(run: Run) -> None:
    """`torch.distributed.checkpoint.state_dict`: it steps an optimizer without state once, at lr 0."""
    run.consolidate()
    model_state, optimizer_state = _through_file(get_state_dict(run.model, run.optimizer))
    run.build()
    run.attach()
    set_state_dict(run.model, run.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def through_distributed_checkpoint(run: Run) -> None:
    """`torch.distributed.checkpoint.save` and `.load`, through a directory that all ranks share."""
    with tempfile.TemporaryDirectory() as mine:
        directory = [mine]
        dist.broadcast_object_list(directory)
        run.consolidate()
        model_state, optimizer_state = get_state_dict(run.model, run.optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory[0])
        run.build()
        run.attach()
        run.consolidate()
        model_state, optimizer_state = get_state_dict(run.model, run.optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory[0])
        set_state_dict(run.model, run.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        dist.barrier()  # rank 0 removes the directory


def get_state_dict_before_training(run: Run) -> Iterator[Any]:
    """It initializes the optimizer's state by a step of lr 0 on gradients of zero."""
    run.attach()
    run.consolidate()
    get_state_dict(run.model, run.optimizer)
    yield from plain_loop(run)


def _through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)
