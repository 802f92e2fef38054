"""Stops a deferred update that does what its optimizer has not done in any step that was watched.

A deferred update runs when a rank first uses a parameter. If it talks to other ranks there, they may be elsewhere; if
it draws random numbers, others have drawn before. What is done every thousand steps only was not seen before, and must
not hang or go wrong in silence.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from ddp_crossover.torch_internals.operations import Operation, OperationWatch
from ddp_crossover.watching.optimizer_snapshot import OptimizerSnapshot, optimizer_parameters
from ddp_crossover.watching.outside_settings import Outside
from ddp_crossover.watching.update_writes import DifferentWrites

_WAY_OUT = (
    "which it did not do in the steps that were watched, and which a deferred update must not do. Leave this optimizer "
    "out of attach(), so that its steps wait for all gradients, or pass schedule='allreduce'"
)


class UnforeseenError(RuntimeError):
    """An optimizer has done in a deferred update what it has not done in any step that was watched."""


def guarded(snapshot: OptimizerSnapshot, outside: Outside) -> AbstractContextManager[None]:
    """Context of a deferred update, in which its code finds values outside of the optimizer as they were at ``step()``.

    Args:
        snapshot: the optimizer at ``step()``; torch's own are not guarded.
        outside: what its code refers to. To look at each operation, or at all generators, takes time.

    Raises:
        UnforeseenError: before it talks to other ranks, or after it has drawn random numbers or changed such a value.
    """
    return nullcontext() if snapshot.is_of_torch else _guarded(snapshot.optimizer, outside)


@contextmanager
def _guarded(optimizer: Optimizer, outside: Outside) -> Iterator[None]:
    device = next((p.device for p in optimizer_parameters(optimizer)), torch.device("cpu"))
    before = random_states(device, outside.mentions)
    communicates = "torch.distributed" in outside.mentions
    with outside.values.shown() as written, _refused_communication(optimizer) if communicates else nullcontext():
        try:
            yield
        except DifferentWrites as error:
            raise UnforeseenError(f"{type(optimizer).__name__}.step() goes wrong: {error}, {_WAY_OUT}") from error
    if written:
        raise UnforeseenError(f"{type(optimizer).__name__}.step() has changed {written[0]}, {_WAY_OUT}")
    if not same_states(before, random_states(device, outside.mentions)):
        raise UnforeseenError(f"{type(optimizer).__name__}.step() has drawn random numbers, {_WAY_OUT}")


@contextmanager
def _refused_communication(optimizer: Optimizer) -> Iterator[None]:
    def before(operation: Operation) -> None:
        if operation.communicates:
            kind = type(optimizer).__name__
            raise UnforeseenError(f"{kind}.step() is about to talk to other ranks ({operation.name}), {_WAY_OUT}")

    watch = OperationWatch(before, lambda *_: None, lambda *_: None)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


def random_states(device: torch.device, modules: Collection[str] = ("random", "numpy")) -> list[Any]:
    """The states of the global generators of torch and of these modules."""
    states: list[Any] = [torch.default_generator.get_state()]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state(device))
    if "random" in modules:
        states.append(random.getstate())
    if "numpy" in modules:
        of_numpy: Any = np.random.get_state(legacy=False)["state"]
        states.append((of_numpy["key"].tobytes(), of_numpy["pos"]))
    return states


def same_states(before: list[Any], after: list[Any]) -> bool:
    """Whether nobody has drawn from generators."""
    return all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(before, after, strict=True)
    )
