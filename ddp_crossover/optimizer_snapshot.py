"""An optimizer as it was when ``step()`` was called, able to do that step later on some of its parameters.

The step runs on a stand-in: an object of the same class with the attributes and hyperparameters of that moment, whose
parameters are other tensors of the same memory. So the optimizer that users hold is never half-changed: whoever looks
at it meanwhile, from another thread or in a signal handler, finds all its param groups and its whole state.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.torch_internals import STEP_HOOKS, raw_step


class ToUpdate(NamedTuple):
    """A parameter, and the tensor of the same memory that the step is to update; its ``.grad`` is the gradient."""

    parameter: Tensor
    memory: Tensor


class OptimizerSnapshot:
    """What one ``step()`` would do.

    Args:
        optimizer: the optimizer; its attributes and hyperparameters are copied, its state is shared.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._attributes = {name: _copied(value) for name, value in vars(optimizer).items() if name not in _REPLACED}
        self._groups = [hyperparameters(group) for group in optimizer.param_groups]

    def step(self, members: Mapping[int, Sequence[ToUpdate]]) -> None:
        """Update these parameters, by the index of their param group."""
        state = self.optimizer.state
        updates = [update for group in members.values() for update in group]
        stand_in: Optimizer = object.__new__(type(self.optimizer))
        vars(stand_in).update(self._attributes)
        vars(stand_in).update((name, OrderedDict()) for name in STEP_HOOKS)
        stand_in.param_groups = [
            {**self._groups[index], "params": [update.memory for update in group]}
            for index, group in sorted(members.items())
        ]
        stand_in.state = defaultdict(dict)
        for parameter, memory in updates:
            if parameter in state:
                stand_in.state[memory] = state[parameter]
        try:
            raw_step(stand_in)(stand_in)
        finally:
            for parameter, memory in updates:
                if memory in stand_in.state and state.get(parameter) is not stand_in.state[memory]:
                    state[parameter] = stand_in.state[memory]
            self._keep_changes(stand_in)

    def _keep_changes(self, stand_in: Optimizer) -> None:
        """Attributes that a step sets, such as that it has checked something once."""
        for name, value in vars(stand_in).items():
            if name not in _REPLACED and value is not self._attributes.get(name):
                self._attributes[name] = value
                setattr(self.optimizer, name, value)


# Not copied from the optimizer. A learning-rate scheduler wraps `step` on the instance.
_REPLACED = frozenset(("param_groups", "state", "step", *STEP_HOOKS))


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group without its parameters, safe from later changes."""
    return {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return copy.copy(value) if isinstance(value, (dict, set)) else value
