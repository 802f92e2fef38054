"""Attaches to models and optimizers that a script builds without telling us."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.addons.launch.process_moments import PROCESS_MOMENTS
from ddp_crossover.addons.launch.watch import watch_model, watch_new_models
from ddp_crossover.attaching import attach
from ddp_crossover.comm.agreement import DisagreementError, all_gather_json
from ddp_crossover.comm_hook import DearState
from ddp_crossover.hook.refusals import JOIN_ADVICE, copy_as_plain, refuse_model, refuse_optimizers
from ddp_crossover.hook.unwrapping import live_objects
from ddp_crossover.log import say, short
from ddp_crossover.moments import Follower
from ddp_crossover.options import Options, switched_off
from ddp_crossover.pending.early_reads import caller
from ddp_crossover.report.stats import DearStats
from ddp_crossover.torch_internals.ddp import has_comm_hook, is_joining, managed_parameters

# Training forwards in which a model may have no optimizer, because the script builds it later.
_FORWARDS_WITHOUT_OPTIMIZER = 10

# Steps with parameters of a model that has not been called in training: the script may call it later.
_STEPS_WITHOUT_FORWARD = 10

_latest: list[Auto] = []  # of this process: the one to which new models belong, or none


@dataclass
class AttachedModel:
    """A model that has been attached to.

    Attributes:
        name: class of the module inside of DDP.
        state: its state; None once it has been detached, or its model dropped.
        by_script: whether the script has attached by itself.
    """

    name: str
    state: DearState | None
    by_script: bool = False
    _last_stats: DearStats | None = None

    def stats(self) -> DearStats:
        """Return the figures, the last ones if it has been detached."""
        if self.state is None:
            assert self._last_stats is not None
            return self._last_stats
        return self.state.stats()

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON values, with the name."""
        stats = self.stats()
        return {"model": self.name, "by_script": self.by_script, **asdict(stats), "obstacles": stats.obstacles}

    def forget_if_detached(self) -> None:
        """Let go of a state that does nothing any more, and of its parameters."""
        if self.state is not None and self.state.detached:
            self._last_stats, self.state = self.state.stats(), None


class Auto:
    """Attaches to every DDP model before its first training forward, with all optimizers over its parameters.

    What cannot be attached to trains as plain DDP, and rank 0 says why.

    Args:
        options: keyword arguments of ``attach``.

    Attributes:
        models: the models attached to so far, in order.
    """

    def __init__(self, **options: Any) -> None:
        self.models: list[AttachedModel] = []
        self._options = options
        self._forwards: WeakKeyDictionary[DistributedDataParallel, int] = WeakKeyDictionary()
        self._uncalled = _Uncalled()

    def begin(self) -> None:
        """Say so from now on when models are trained that nobody calls."""
        self._uncalled.begin()

    def end(self) -> None:
        """Another has taken over new models."""
        self._uncalled.stop()

    @property
    def states(self) -> list[DearState]:
        """States of the models that are attached now."""
        return [model.state for model in self.models if model.state is not None and not model.state.detached]

    def before_forward(self, ddp: DistributedDataParallel) -> bool:
        """Attach to ``ddp`` if all ranks can; returns whether to be called before its next training forward again."""
        self._uncalled.stop()
        if has_comm_hook(ddp):
            return False  # the script has attached by itself, or uses another hook
        if is_joining(ddp):  # a rank without batches makes no forward, so there is nobody to ask
            _say_plain(ddp, JOIN_ADVICE)
            return False
        optimizers = _optimizers_of(ddp)
        self._forwards[ddp] = self._forwards.get(ddp, 0) + 1
        waits = not optimizers and self._forwards[ddp] < _FORWARDS_WITHOUT_OPTIMIZER
        # All ranks do the same: attaching is collective, and one rank may refuse what the others would take.
        answers = all_gather_json([waits, _why_not(ddp, optimizers)], ddp.process_group, _device_of(ddp))
        if any(waits for waits, _ in answers):
            return True
        why_not = next((why_not for _, why_not in answers if why_not is not None), None)
        if why_not is None:
            try:
                self._attach(ddp, optimizers)
            except (TypeError, ValueError, DisagreementError) as error:
                why_not = str(error)
        if why_not is not None:
            _say_plain(ddp, why_not)
        return False

    def _attach(self, ddp: DistributedDataParallel, optimizers: list[Optimizer]) -> None:
        name = type(ddp.module).__name__
        for model in self.models:
            model.forget_if_detached()
        state = attach(ddp, optimizers, **self._options)
        # Also where `attach` refuses copies because they would train otherwise: the script knows of no hook.
        copy_as_plain(ddp, state.synchronize)
        self.models.append(AttachedModel(name, state))
        if dist.get_rank(ddp.process_group) == 0:
            millions = sum(parameter.numel() for _, parameter in managed_parameters(ddp)) / 1e6
            world_size = dist.get_world_size(ddp.process_group)
            ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
            names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
            say(f"attached to {name} ({short(millions)} M parameters, {ranks}) with {names}")


class _Uncalled(Follower):
    """Says so when optimizers train DDP models that nobody calls, so that nothing is attached to."""

    def __init__(self) -> None:
        self._steps = 0
        self._text = ""
        self._is_said = False
        self._model_of: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()

    def begin(self) -> None:
        """Look from now on."""
        PROCESS_MOMENTS.follow(self)
        atexit.register(self._say)

    def stop(self) -> None:
        """Look no more: a model is called."""
        PROCESS_MOMENTS.leave(self)
        atexit.unregister(self._say)

    def step_ends(self, optimizer: Optimizer) -> None:
        if self._is_said:  # not removed here, inside of a step: torch is going through the hooks
            return
        if optimizer not in self._model_of:
            self._model_of[optimizer] = _trained_by(optimizer)
        if not (model := self._model_of[optimizer]):
            return
        self._steps += 1
        self._text = self._text or (
            f"nothing is attached to: {type(optimizer).__name__}.step() at {caller()} trains {model}, whose "
            "DistributedDataParallel has not been called in training, so it reduces nothing. Call ddp(x) in training, "
            "not ddp.module(x), unless the script averages gradients by itself"
        )
        if self._steps == _STEPS_WITHOUT_FORWARD:
            self._say()

    def _say(self) -> None:
        if self._text and not self._is_said:
            self._is_said = True
            say(self._text, logging.WARNING)


def _trained_by(optimizer: Optimizer) -> str:
    """The model of DDP that this optimizer trains on rank 0, by name; empty if there is none, or it has a hook."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for ddp in live_objects(DistributedDataParallel):
        if any(id(parameter) in own for _, parameter in managed_parameters(ddp)) and not has_comm_hook(ddp):
            return type(ddp.module).__name__ if dist.get_rank(ddp.process_group) == 0 else ""
    return ""


def _say_plain(ddp: DistributedDataParallel, why: str) -> None:
    if dist.get_rank(ddp.process_group) == 0:
        say(f"{type(ddp.module).__name__} trains as plain DDP: {why}", logging.WARNING)


def _why_not(ddp: DistributedDataParallel, optimizers: list[Optimizer]) -> str | None:
    if not optimizers:
        return "there is no torch.optim.Optimizer over its parameters"
    try:
        refuse_model(ddp)
        refuse_optimizers(ddp, optimizers)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _optimizers_of(ddp: DistributedDataParallel) -> list[Optimizer]:
    """Return all optimizers that update parameters of ``ddp``, in the same order on all ranks.

    Of an optimizer and one that wraps it (a look-ahead, a framework's), the one inside: its ``step()`` updates.
    """
    index_of = {id(parameter): index for index, (_, parameter) in enumerate(managed_parameters(ddp))}
    found = [
        (indices, thing)
        for thing in live_objects(Optimizer)
        if (indices := [index_of[key] for key in _keys_of(thing) if key in index_of])
    ]
    ids = {id(optimizer) for _, optimizer in found}
    inside = [
        (indices, optimizer)
        for indices, optimizer in found
        if not any(id(value) in ids and value is not optimizer for value in vars(optimizer).values())
    ]
    return [optimizer for _, optimizer in sorted(inside, key=lambda one: (one[0], type(one[1]).__name__))]


def _keys_of(optimizer: Optimizer) -> list[int]:
    try:
        return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    except Exception:  # a wrapper may raise when it is asked before it is ready
        return []


def _device_of(ddp: DistributedDataParallel) -> torch.device:
    return managed_parameters(ddp)[0][1].device


def auto(**options: Any) -> Auto:
    """Attach to every DDP model of this process before its first training forward, with all optimizers over it.

    Call it anywhere before training; a script without DDP is left alone. Rank 0 says what was attached to, and why
    another model was not. A model with a communication hook of its own is left as it is. ``DDP_CROSSOVER=off`` in the
    environment turns it off. Without any line: ``python -m ddp_crossover run train.py``.

    If it is called again, the last call counts for models that are built after it.

    Args:
        options: keyword arguments of :class:`DearState`, except ``process_group``.

    Returns:
        An object whose ``states`` are those of the models attached to.

    Raises:
        TypeError, ValueError: for options that no model could take.
    """
    refuse_options(options)
    found = Auto(**options)
    if not switched_off():
        if not _latest:
            watch_new_models(DistributedDataParallel, lambda: _latest[0].before_forward)
        for earlier in _latest:
            earlier.end()
        _latest[:] = [found]
        found.begin()
        for ddp in live_objects(DistributedDataParallel):
            if not has_comm_hook(ddp):
                watch_model(ddp, found.before_forward)
    return found


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for options that no model could take."""
    Options(**{name: value for name, value in options.items() if name != "lease"})
