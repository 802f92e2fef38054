"""Lists and dicts among an optimizer's settings that its updates write to, as RAdam's table of what the step decides.

Each deferred update begins with the content at ``step()``, and puts what it has made of it into the optimizer's own.
That is what a whole step leaves if each update of it writes the same: if what is written is a function of settings and
counts, and these are the same for all parameters that have a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Set
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.watching.optimizer_snapshot import dotted_attributes
from ddp_crossover.watching.values import CONTAINERS, writable_parts

_MOST_ENTRIES = 1000  # of a cache, which is copied in each step and for each update


def caches_among(optimizer: Optimizer, changed: Collection[str]) -> frozenset[str]:
    """Which of these settings, as param groups or ``.attributes`` have them, hold something that can be written to."""
    settings = [*optimizer.param_groups, dotted_attributes(optimizer)]
    return frozenset(name for each in settings for name in changed if isinstance(each.get(name), CONTAINERS))


def why_no_shards(optimizer: Optimizer, changed: Collection[str]) -> str | None:
    """Why shards cannot be updated apart, if a step changes these settings; None if they can."""
    caches = caches_among(optimizer, changed)
    return f"its step() writes to {min(caches)!r}, which belongs to no parameter" if caches else None


def why_updates_may_differ(optimizer: Optimizer, caches: Set[str]) -> str | None:
    """Why updates may write different things to these caches in this step; None if they write the same."""
    if not caches:
        return None
    groups, written = optimizer.param_groups, f"its step() writes to {min(caches)!r}"
    for settings in [*groups, dotted_attributes(optimizer)]:
        lists = [settings[name] for name in caches & settings.keys() if isinstance(settings[name], CONTAINERS)]
        if any(len(each) > _MOST_ENTRIES for each in lists):
            return f"{written}, which has more than {_MOST_ENTRIES} entries to copy for each update"
    if len(groups) > 1 and any(name.startswith(".") for name in caches):
        return f"{written}, which param groups share"
    for group in groups:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        counts = [_counts(dict.get(optimizer.state, parameter, {}), parameter) for parameter in trained]
        if any(each is None or each != counts[0] for each in counts):
            return f"{written}, and not all parameters were updated equally often"
    return None


def why_found_twice(optimizer: Optimizer, changed: Collection[str]) -> str | None:
    """Why a step that changes these settings does more than a deferred update would see; None if it does not.

    Each deferred update, and each trial, has a copy of every setting, so what two settings share is two things there.
    """
    if ".defaults" in changed:
        return "its step() writes to its .defaults"
    settings = [
        *optimizer.param_groups,
        {**dotted_attributes(optimizer), ".defaults": None},
        _shared_entries(optimizer),
    ]
    named = [(name, value) for each in settings for name, value in each.items() if name != "params"]
    found = Counter(id(part) for _, value in named for part in writable_parts(value))
    for name, value in named:
        if name in changed and any(found[id(part)] > 1 for part in writable_parts(value)):
            return f"its step() writes to {name!r}, which another setting or param group shares"
    return None


def _shared_entries(optimizer: Optimizer) -> dict[str, Any]:
    return {f"[{key!r}]": each for key, each in dict.items(optimizer.state) if not isinstance(key, Tensor)}


def _counts(state: dict[str, Any], parameter: Tensor) -> dict[str, Any] | None:
    """The numbers in a parameter's state; None if some are in tensors, which takes time to read."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    if any(tensor.numel() == 1 < parameter.numel() for tensor in tensors):
        return None
    return {name: value for name, value in state.items() if isinstance(value, (bool, int, float))}
