"""What a script may have made of the entries of an optimizer's state, as by a checkpoint that it has converted."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.watching.lazy_state import LazyState

_COUNTS = frozenset(("step", "mu_product"))  # of torch's own optimizers, in a dtype of their own
_DTYPES_OF_COUNTS = (torch.float32, torch.float64)


class Entries(NamedTuple):
    """What is known of all entries.

    Attributes:
        share_a_tensor: whether two parameters have one tensor, which a step then changes once for each.
        are_usual: whether each holds tensors alone, in the dtype of its parameter, as torch's own optimizers make them.
            A step takes others, such as whole numbers of steps; with ``foreach=True`` it does not.
    """

    share_a_tensor: bool
    are_usual: bool


def entries_of_state(optimizer: Optimizer) -> Entries:
    """Look at all entries, or, if only updates have changed any since the last look, remember it."""
    state = vars(optimizer).get("state")
    if not isinstance(state, dict):  # of a class that skips ``Optimizer.__init__``
        return Entries(False, False)
    known = state.entries if isinstance(state, LazyState) else None
    if known is None:
        known = _look(state)
        if isinstance(state, LazyState):
            state.entries = known
    return known


def why_entries_depend(optimizer: Optimizer) -> str | None:
    """Why the update of one parameter changes the state of another one; None if it does not."""
    if not entries_of_state(optimizer).share_a_tensor:
        return None
    return "parameters share a tensor of its state, which each update changes. Give each a tensor of its own"


def _look(state: dict[Any, Any]) -> Entries:
    ids: set[int] = set()
    count, are_usual = 0, True
    for parameter, entry in dict.items(state):  # the methods of a LazyState would count as a look of others
        if not isinstance(parameter, Tensor) or not isinstance(entry, dict):
            continue
        for name, value in entry.items():
            if isinstance(value, Tensor):
                ids.add(id(value))
                count += 1
                is_count = name in _COUNTS and value.dtype in _DTYPES_OF_COUNTS
                are_usual = are_usual and (value.dtype is parameter.dtype or is_count)
            elif value is not None:  # as of SGD without momentum
                are_usual = False
    return Entries(len(ids) < count, are_usual)
