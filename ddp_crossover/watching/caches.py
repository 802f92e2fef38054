"""Lists and dicts among an optimizer's settings that its updates write to, as RAdam's table of what the step decides.

Each deferred update begins with the content at ``step()``, and puts what it has made of it into the optimizer's own.
That is what a whole step leaves if each update of it writes the same: if what is written is a function of settings and
counts, and these are the same for all parameters that have a gradient.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.watching.optimizer_snapshot import CONTAINERS, attributes_of


def caches_among(optimizer: Optimizer, changed: Collection[str]) -> frozenset[str]:
    """Which of these settings, as param groups or ``.attributes`` have them, hold something that can be written to."""
    settings = [*optimizer.param_groups, attributes_of(optimizer)]
    return frozenset(name for each in settings for name in changed if isinstance(each.get(name), CONTAINERS))


def why_no_shards(optimizer: Optimizer, changed: Collection[str]) -> str | None:
    """Why shards cannot be updated apart, if a step changes these settings; None if they can."""
    caches = caches_among(optimizer, changed)
    return f"its step() writes to {min(caches)!r}, which belongs to no parameter" if caches else None


def why_updates_may_differ(optimizer: Optimizer, caches: Collection[str]) -> str | None:
    """Why updates may write different things to these caches in this step; None if they write the same."""
    if not caches:
        return None
    groups, written = optimizer.param_groups, f"its step() writes to {min(caches)!r}"
    own = [id(group[name]) for group in groups for name in caches if name in group]
    if len(set(own)) < len(own) or (len(groups) > 1 and any(name.startswith(".") for name in caches)):
        return f"{written}, which param groups share"
    for group in groups:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        counts = [_counts(dict.get(optimizer.state, parameter, {}), parameter) for parameter in trained]
        if any(each is None or each != counts[0] for each in counts):
            return f"{written}, and not all parameters were updated equally often"
    return None


def _counts(state: dict[str, Any], parameter: Tensor) -> dict[str, Any] | None:
    """The numbers in a parameter's state; None if some are in tensors, which takes time to read."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    if any(tensor.numel() == 1 < parameter.numel() for tensor in tensors):
        return None
    return {name: value for name, value in state.items() if isinstance(value, (bool, int, float))}
