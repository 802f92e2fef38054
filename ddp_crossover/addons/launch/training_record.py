"""What ``verify`` records of a script's training, to compare it with another run of the same script.

Takes what costs no overlap: each loss when it is differentiated, and before each optimizer step the parameters, which
forward has brought up to date by then. After the last step it reads everything.

From three ranks on, plain DDP is made to add in rank order, where that is what we do. Up to two summands there is only
one order.
"""
# No `from __future__ import annotations` here: DDP checks the annotations of hooks, and expects types.

import functools
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.addons.launch.auto import Auto
from ddp_crossover.addons.launch.errand import Errand
from ddp_crossover.addons.launch.recording import Models, Recording, described, digest, digests, named
from ddp_crossover.comm.all_reduce import family_of
from ddp_crossover.moments import Follower
from ddp_crossover.pending.pending_parameter import PendingParameter
from ddp_crossover.torch_internals.ddp import GradBucket, has_comm_hook

_FIRST_AMBIGUOUS_WORLD_SIZE = 3


class TrainingRecord(Follower):
    """Records the training of this rank until some optimizer has made so many steps.

    Args:
        errand: of the process.
        auto: what has been attached to; None in a run of plain DDP.
    """

    def __init__(self, errand: Errand, auto: Auto | None) -> None:
        self._recording = Recording(errand, self._content)
        self._auto = auto
        # By id, as they may define equality; the reference keeps the id from being used again.
        self._optimizers: dict[int, Optimizer] = {}
        self._steps_of: Counter[int] = Counter()
        self._losses: list[float] = []
        self._before_steps: list[dict[str, str]] = []
        self._sums_are_in_rank_order = self._sums_may_round = False
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def record_and_go_back(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._losses.extend(float(loss.detach().sum()) for loss in _tensors(tensors))
            backward(tensors, *args, **kwargs)

        torch.autograd.backward = record_and_go_back

    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        """Take note of a model that is trained, and of the order in which plain DDP adds up its gradients."""
        self._recording.note_model(ddp)
        if dist.get_world_size(ddp.process_group) < _FIRST_AMBIGUOUS_WORLD_SIZE:
            return
        if family_of(ddp.process_group, next(ddp.parameters()).device) != "gloo":
            self._sums_may_round = True  # an order that cannot be had otherwise
        elif self._auto is None and not has_comm_hook(ddp):
            ddp.register_comm_hook(ddp.process_group, rank_order_hook)
            self._sums_are_in_rank_order = True

    def _content(self, models: Models) -> dict[str, Any]:
        figures = [] if self._auto is None else [model.figures() for model in self._auto.models]
        names = {id(p): name for name, p in named("named_parameters", models)}
        content = {
            "models": figures,
            "losses": self._losses,
            "before_steps": self._before_steps,
            "parameters": digests("named_parameters", models),
            "buffers": digests("named_buffers", models),
            "optimizers": [_state_of(optimizer, names) for optimizer in self._optimizers.values()],
            "sums_are_in_rank_order": self._sums_are_in_rank_order,
            "sums_may_round": self._sums_may_round,
        }
        values = {name: p.detach().cpu().clone() for name, p in named("named_parameters", models)}
        torch.save(values, self._recording.path.with_suffix(".pt"))
        return content

    def step_begins(self, optimizer: Optimizer) -> None:
        self._before_steps.append(
            {
                name: digest(p)
                for name, p in named("named_parameters", self._recording.models)
                if not isinstance(p, PendingParameter)  # not used in forward: reading it would disturb
            }
        )

    def step_ends(self, optimizer: Optimizer) -> None:
        self._optimizers[id(optimizer)] = optimizer
        self._steps_of[id(optimizer)] += 1
        self._recording.note_steps(max(self._steps_of.values()))


def rank_order_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the mean as ((g0 + g1) + g2) + ..., each rank having divided its own gradient first.

    That is our order; gloo itself adds in the order of its ring, which differs from element to element.
    """
    scaled = torch.mul(bucket.buffer(), 1.0 / dist.get_world_size(group))
    gathered = [torch.empty_like(scaled) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, scaled, group=group)
    mean = gathered[0]
    for gradient in gathered[1:]:
        mean.add_(gradient)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(mean)
    return future


def _tensors(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [one for one in tensors if isinstance(one, Tensor)]


def _state_of(optimizer: Optimizer, names: dict[int, str]) -> dict[str, str]:
    """What is in an optimizer's state, by the name of the parameter and the key."""
    state = {}
    for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for key, value in optimizer.state.get(parameter, {}).items():
            name = f"{type(optimizer).__name__}: {key} of {names.get(id(parameter), f'parameter {place}')}"
            state[name] = described(value)
    return state
