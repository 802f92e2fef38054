"""Asks an optimizer questions by trials on small clones of it, and remembers the answers of torch's own optimizers.

An answer depends on the optimizer's class, the settings of its param groups, and the kinds of its parameters. A process
that attaches many models, or one model again, asks the same questions each time; a trial takes some 20 ms.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from ddp_crossover.optim.optimizer_snapshot import hyperparameters, is_of_torch
from ddp_crossover.torch_internals.optimizers import raw_step

_MOST_ANSWERS = 256
_answers: dict[Hashable, str | None] = {}

Question = Callable[[Optimizer, bool], str | None]
"""A trial on an optimizer, with the state that it has if the second argument says so; returns a reason or None."""


def ask(question: Question, optimizer: Optimizer, failed: Callable[[Exception], str | None]) -> str | None:
    """Return the answer to ``question``, or ``failed`` of the error that the trial raised without state and with it.

    Leaves the global random states of torch, NumPy and Python as they were.
    """
    kind = (question, *_kind(optimizer)) if is_of_torch(optimizer) else None
    if kind in _answers:
        return _answers[kind]
    # Empty state first. Some optimizers (Adagrad up to torch 2.11) create state in `__init__`, and fail without it.
    try:
        with _random_states_kept(optimizer):
            answer = question(optimizer, False)
    except Exception:
        try:
            with _random_states_kept(optimizer):
                return question(optimizer, True)
        except Exception as error:
            return failed(error)
    if kind is not None:
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        _answers[kind] = answer
    return answer


def _kind(optimizer: Optimizer) -> tuple[Any, ...]:
    groups = []
    for group in optimizer.param_groups:
        settings = hyperparameters(group)
        settings.pop("lr", None)  # schedulers move it, and no formula changes with it
        kinds = sorted({(p.dim(), str(p.dtype), str(p.device)) for p in group["params"]})
        groups.append((repr(sorted(settings.items())), tuple(kinds)))
    return (type(optimizer), raw_step(optimizer), tuple(groups))


@contextmanager
def _random_states_kept(optimizer: Optimizer) -> Iterator[None]:
    devices = {p.device for g in optimizer.param_groups for p in g["params"] if p.device.type == "cuda"}
    of_python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
