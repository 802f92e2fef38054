"""What a script may have made of the entries of an optimizer's state, as by a checkpoint that it has converted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_crossover.torch_internals.memory import Memory, memory_of, which_overlap
from ddp_crossover.walks import walk
from ddp_crossover.watching.foreach import DTYPES_ALIKE
from ddp_crossover.watching.known_optimizers import attached_optimizers
from ddp_crossover.watching.lazy_state import LazyState
from ddp_crossover.watching.values import insides_of, is_constant, writable_parts

_ANSWERS_IF_HELD = 60  # of some 20 steps
_COUNTS = frozenset(("step", "mu_product"))  # of torch's own optimizers, in a dtype of their own


class Entries(NamedTuple):
    """What is known of all entries.

    Attributes:
        share_memory: whether two parameters have a part in common, which a step then changes once for each.
        are_usual: whether each holds tensors alone, in the dtype of its parameter, as torch's own optimizers make them.
            A step takes others, such as whole numbers of steps; with ``foreach=True`` it does not.
        held: ids of the parameters of whose entry something else refers to a part, as to an object that a script has
            put there. A script may read and change that past ``optimizer.state``.
        others_share: whether another attached optimizer has a part of them, too: ``load_state_dict`` copies no tensors.
    """

    share_memory: bool
    are_usual: bool
    held: frozenset[int] = frozenset()
    others_share: bool = False


def entries_of_state(optimizer: Optimizer) -> Entries:
    """Look at all entries, or, if only updates have changed any since the last look, remember that for a while."""
    state = vars(optimizer).get("state")
    if not isinstance(state, dict):  # of a class that skips ``Optimizer.__init__``
        return Entries(False, False)
    if not isinstance(state, LazyState):
        return _look(optimizer)
    known: Entries | None = state.entries
    state.answers += 1
    # Nobody sees that a script lets go of what it has held, and each look takes milliseconds.
    if known is None or (known.held and state.answers >= _ANSWERS_IF_HELD):
        known = state.entries = _look(optimizer)
        state.answers = 0
    return known


def why_entries_depend(optimizer: Optimizer) -> str | None:
    """Why updates that change the state of one parameter change another one's, too; None if they do not."""
    known = entries_of_state(optimizer)
    if known.share_memory:
        return "parameters share a part of its state, which each update changes. Give each a copy of its own"
    if known.others_share:
        return "another optimizer has a part of its state, which both change. Load a copy.deepcopy() of a state_dict()"
    return None


def look_at_all() -> None:
    """Apply what is pending of all attached optimizers, and look at their entries anew: two may share some now."""
    for optimizer in attached_optimizers():
        if isinstance(state := vars(optimizer).get("state"), LazyState):
            state.apply_pending()


def _look(optimizer: Optimizer) -> Entries:
    state: dict[Any, Any] = optimizer.state
    held = _held(state)  # first, because the entries below are references, too
    # The methods of a LazyState would count as a look of others.
    entries = [(key, entry) for key, entry in dict.items(state) if isinstance(key, Tensor)]
    others = [vars(other).get("state") for other in attached_optimizers() if other is not optimizer]
    return Entries(
        share_memory=_share_memory([entry for _, entry in entries]),
        are_usual=all(_is_usual(parameter, entry) for parameter, entry in entries if isinstance(entry, dict)),
        held=held,
        others_share=bool(entries) and any(_share_memory([state, other]) for other in others),
    )


def _held(state: dict[Any, Any]) -> frozenset[int]:
    return frozenset(id(key) for key in dict.keys(state) if isinstance(key, Tensor) and _is_held(state, key))


def _is_held(state: dict[Any, Any], key: Tensor) -> bool:
    """Whether something in an entry that can change has more references than those that lead to it from the state."""
    # Not the entry and its tensors, to which a checkpoint refers that a script has saved or loaded and keeps: nothing
    # would be deferred any more. A parameter there is one of a model.
    entry = dict.get(state, key)
    alone: list[Any] = [[], 0]  # has the references that there are here to each
    found = {0: alone}
    for each in walk(entry, insides_of):
        is_tensor = isinstance(each, Tensor) and not isinstance(each, Parameter)
        if each is not entry and not is_tensor and not is_constant(each):
            found.setdefault(id(each), [each, 0])[1] += 1
    each = None
    excess = [sys.getrefcount(value) - count for value, count in found.values()]
    return bool(max(excess) > excess[0])


def _share_memory(entries: Sequence[Any]) -> bool:
    """Whether two entries, or two whole states, have one list, dict or object, or tensors whose memory overlaps."""
    owner: dict[int, int] = {}
    places: list[tuple[Memory | None, int]] = []
    for number, entry in enumerate(entries):
        for part in writable_parts(entry):
            if owner.setdefault(id(part), number) != number:
                return True
            if isinstance(part, Tensor):
                places.append((memory_of(part), number))
    return bool(which_overlap(places))


def _is_usual(parameter: Tensor, entry: dict[Any, Any]) -> bool:
    return all(
        value is None  # as of SGD without momentum
        or (
            isinstance(value, Tensor)
            and (value.dtype is parameter.dtype or (name in _COUNTS and value.dtype in DTYPES_ALIKE))
        )
        for name, value in entry.items()
    )
