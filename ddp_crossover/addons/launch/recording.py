"""The record of a script's training on this rank, for ``verify`` and ``doctor``, and then the end of the script."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.addons.launch.errand import STEPS_MADE, Errand
from ddp_crossover.hook.unwrapping import live_objects
from ddp_crossover.walks import walk
from ddp_crossover.watching.values import insides_of, is_constant

Models = Sequence[DistributedDataParallel]


class Recording:
    """Notes which models are trained and how many steps are made, and writes the record at the last one.

    A script that ends by itself has its record written then.

    Args:
        errand: says where, and after how many steps to end.
        content: returns what is recorded of these models, as JSON values; None if there are too few steps.

    Attributes:
        path: the file of this rank.
        models: those that have made a training forward.
    """

    def __init__(self, errand: Errand, content: Callable[[Models], dict[str, Any] | None]) -> None:
        rank = dist.get_rank()  # not from the environment: the script may start its ranks by itself
        folder = Path(errand.folder)
        self.path = folder / f"{rank}.json"
        self.models: list[DistributedDataParallel] = []
        self._progress = folder / STEPS_MADE if rank == 0 else None
        self._steps = errand.steps
        self._content = content
        self._has_ended = False
        atexit.register(self._write)

    def note_model(self, ddp: DistributedDataParallel) -> None:
        if not any(ddp is model for model in self.models):
            self.models.append(ddp)

    def note_steps(self, steps: int) -> None:
        """Note how many steps have been made; does not return from the last one.

        The process ends at once, when all ranks are here: one whose groups were not destroyed may be aborted when the
        interpreter is taken down.
        """
        if self._has_ended:
            return
        if self._progress is not None:
            self._progress.write_text(f"{steps}\n")
        if steps < self._steps:
            return
        status = 0
        try:
            self._write()
        except Exception:  # a full disk: the other ranks end here as well
            traceback.print_exc()
            status = 1
        if dist.is_initialized():
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _write(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        models = self.models or live_objects(DistributedDataParallel)  # that have made no forward
        if (content := self._content(models)) is not None:
            self.path.write_text(json.dumps(content))


def digest(tensor: Tensor) -> str:
    """Return a digest of the tensor's values, dtype and shape."""
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(values.tobytes(), digest_size=8, key=f"{tensor.dtype}{[*tensor.shape]}".encode()).hexdigest()


def described(value: Any) -> str:
    """Return what two runs have to agree on: tensors and numbers in it, and the classes and sizes of what holds them.

    Not by ``repr``, which leaves out most of a tensor, shows where objects are, and ends at a thousand levels.
    """
    return " ".join(map(_described, walk(value, _with_keys)))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return digest(value)
    is_shown = (is_constant(value, levels=0) and not callable(value)) or isinstance(value, np.ndarray)
    return repr(value) if is_shown else f"{type(value).__qualname__}({len(_with_keys(value))})"


def _with_keys(value: Any) -> Collection[Any]:
    return [*dict.keys(value), *dict.values(value)] if isinstance(value, dict) else insides_of(value)


def named(what: str, models: Models) -> Iterator[tuple[str, Tensor]]:
    """Yield the ``named_parameters`` or ``named_buffers`` of models, with the model's number if there are several."""
    for number, ddp in enumerate(models, 1):
        for name, tensor in getattr(ddp.module, what)():
            yield (f"model {number}: {name}" if len(models) > 1 else name), tensor


def digests(what: str, models: Models) -> dict[str, str]:
    """Return the digest of each of the ``named_parameters`` or ``named_buffers`` of models."""
    return {name: digest(tensor) for name, tensor in named(what, models)}
