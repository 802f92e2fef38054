"""Records a script's training, to compare it with another run of the same script.

Takes what costs no overlap: each loss when it is differentiated, and before each optimizer step the parameters, which
forward has brought up to date by then. After the last step it reads everything.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_crossover.ddp.unwrapping import live_objects
from ddp_crossover.launch.ending import Ending
from ddp_crossover.launch.synchronized import digest, named, parameter_digests
from ddp_crossover.parameters.pending_parameter import PendingParameter


class TrainingRecord:
    """Records the training of this rank until some optimizer has made so many steps, then ends the script.

    Attributes:
        sums_are_in_rank_order: whether plain DDP was made to add in rank order.
        sums_may_round: whether it adds in an order that cannot be had otherwise.

    Args:
        folder: where the record is written.
        rank: this rank.
        steps: number of steps of an optimizer.
        summary: called at the end for what else belongs into the record.
    """

    def __init__(self, folder: Path, rank: int, steps: int, summary: Callable[[], dict[str, Any]]) -> None:
        self._folder, self._rank = folder, rank
        self._ending = Ending(folder, steps, self.write)
        self._summary = summary
        self._models: list[DistributedDataParallel] = []
        self._optimizers: list[Optimizer] = []
        self._made: list[int] = []
        self._losses: list[float] = []
        self._before_steps: list[dict[str, str]] = []
        self._has_ended = False
        self.sums_are_in_rank_order = self.sums_may_round = False

    def note_order(self, *, may_round: bool = False, in_rank_order: bool = False) -> None:
        """Note in which order plain DDP adds up the gradients of a model, see the attributes."""
        self.sums_may_round |= may_round
        self.sums_are_in_rank_order |= in_rank_order

    def begin(self) -> None:
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def record_and_go_back(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._losses.extend(float(loss.detach().sum()) for loss in _tensors(tensors))
            backward(tensors, *args, **kwargs)

        torch.autograd.backward = record_and_go_back

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Take note of a model that is trained."""
        if not any(ddp is model for model in self._models):
            self._models.append(ddp)

    def write(self) -> None:
        """Write the record; the first call counts."""
        if self._has_ended:
            return
        self._has_ended = True
        models = self._models or live_objects(DistributedDataParallel)  # that have made no forward
        names = {id(p): name for name, p in named("named_parameters", models)}
        record = {
            **self._summary(),
            "losses": self._losses,
            "before_steps": self._before_steps,
            "parameters": parameter_digests(models),
            "buffers": {name: digest(b) for name, b in named("named_buffers", models)},
            "optimizers": [_state_of(optimizer, names) for optimizer in self._optimizers],
            "sums_are_in_rank_order": self.sums_are_in_rank_order,
            "sums_may_round": self.sums_may_round,
        }
        (self._folder / f"{self._rank}.json").write_text(json.dumps(record))
        torch.save(
            {name: p.detach().cpu().clone() for name, p in named("named_parameters", models)},
            self._folder / f"{self._rank}.pt",
        )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._has_ended:
            self._before_steps.append(
                {
                    name: digest(p)
                    for name, p in named("named_parameters", self._models)
                    if not isinstance(p, PendingParameter)  # not used in forward: reading it would disturb
                }
            )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        place = next((i for i, known in enumerate(self._optimizers) if known is optimizer), None)
        if place is None:
            place = len(self._optimizers)
            self._optimizers.append(optimizer)
            self._made.append(0)
        self._made[place] += 1
        if not self._has_ended:
            self._ending.note(max(self._made))


def _tensors(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [one for one in tensors if isinstance(one, Tensor)]


def _state_of(optimizer: Optimizer, names: dict[int, str]) -> dict[str, str]:
    """Digests of an optimizer's state by the name of the parameter and the key."""
    digests = {}
    for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for key, value in optimizer.state.get(parameter, {}).items():
            name = f"{type(optimizer).__name__}: {key} of {names.get(id(parameter), f'parameter {place}')}"
            digests[name] = digest(value) if isinstance(value, Tensor) else repr(value)
    return digests
