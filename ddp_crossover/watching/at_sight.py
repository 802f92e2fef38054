"""What is known of an optimizer at a glance, by its class, its attributes and its settings, that makes it wait."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.torch_internals.memory import memory_of
from ddp_crossover.torch_internals.optimizers import attributes_of, has_hooks, has_raw_step
from ddp_crossover.walks import walk
from ddp_crossover.watching.clone import is_exhausted
from ddp_crossover.watching.optimizer_snapshot import (
    dotted_attributes,
    hyperparameters,
    is_of_torch,
    optimizer_parameters,
    reads_attributes,
)
from ddp_crossover.watching.outside_settings import Outside
from ddp_crossover.watching.values import copyable, parts_of, same, tensors_in

_MOST_COEFFICIENTS = 3
_MOST_ELEMENTS = 4096  # of a tensor, because it is copied in each step


def why_not_at_sight(optimizer: Optimizer, found: Outside) -> str | None:
    """Why updates must not be deferred, as far as one can see; ``found`` is what its code refers to outside of it."""
    name = _unknown_attribute(optimizer)
    if name is not None and isinstance(inner := getattr(optimizer, name), Optimizer):
        return f"it wraps another optimizer. Attach that one, its .{name} ({type(inner).__name__}), instead"
    if not has_hooks(optimizer):
        return "its class does not call Optimizer.__init__(), so its step() takes no hooks"
    if not has_raw_step(optimizer):
        return (
            "its step() is not the plain method of a torch.optim.Optimizer class: something has replaced or wrapped it"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "a param group has differentiable=True"
    if (reason := why_parameters_repeat(optimizer)) is not None:
        return reason
    if name is not None:
        return f"its attribute .{name} may hold parameters or another optimizer"
    if _knows_parameters_by_id(optimizer, found):
        return (
            "it stores the id() of parameters, and deferred updates run on other tensor objects. Keep what belongs to "
            "a parameter in optimizer.state"
        )
    if (reason := _why_settings_may_change(optimizer, found)) is not None:
        return reason
    return _why_places_may_matter(optimizer, found)


def why_parameters_repeat(optimizer: Optimizer) -> str | None:
    """Why its parameters cannot be updated one by one, or None: asked in each step, since a script may add to lists."""
    parameters = optimizer_parameters(optimizer)
    if len(set(map(id, parameters))) == len(parameters):
        return None
    return "a parameter is more than once in its param groups, and each step updates it as often"


def why_names_matter(optimizer: Optimizer, found: Outside) -> str | None:
    """Why a deferred update would lack the names of its parameters, or None: asked in each step as well."""
    if "param_names" in found.mentions and any("param_names" in group for group in optimizer.param_groups):
        return "its step() goes by the names of parameters (param_names), which a deferred update of some has not"
    return None


def _why_places_may_matter(optimizer: Optimizer, found: Outside) -> str | None:
    """Describe a setting that may have an entry for each parameter, by its place in the list; None without any.

    In a deferred update each parameter is the first one. Trials cannot tell, while entries are the same.
    """
    numbers = {len(group["params"]) for group in optimizer.param_groups} - {0}
    numbers |= {len(optimizer_parameters(optimizer))}
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name not in ("params", "param_names") and _has_places(value, numbers, or_more=True):
                return f"{name!r} in a param group may have an entry for each parameter, by its place"
    for name, value in attributes_of(optimizer).items():
        is_setting = not name.startswith("_optimizer_")  # those are hooks
        if is_setting and _has_places(value, numbers, or_more=True):
            return f"its attribute .{name} may have an entry for each parameter, by its place"
    seen: dict[int, Any] = {}  # each of the attributes of an object out there is one of the values by itself
    for what, value in found.values.items():
        if _has_places(value, numbers, or_more=False, seen=seen):
            return f"{what}, which its step() reads, may have an entry for each parameter, by its place"
    return None


def _has_places(value: Any, numbers: set[int], *, or_more: bool, seen: dict[int, Any] | None = None) -> bool:
    """Whether a value is, or holds, a list of some length in ``numbers``, or a dict with numbers as keys."""
    return any(_is_by_place(each, numbers, or_more) for each in walk(value, _in_lists_and_records, seen))


def _in_lists_and_records(value: Any) -> Collection[Any]:
    return () if isinstance(value, (set, frozenset, deque)) else parts_of(value)


def _is_by_place(value: Any, numbers: set[int], or_more: bool) -> bool:
    if isinstance(value, dict):
        return any(isinstance(key, (int, tuple)) for key in value)
    if isinstance(value, Tensor):
        value = value.flatten().tolist() if 1 < value.numel() <= _MOST_ELEMENTS else [0.0] * value.numel()
    if not isinstance(value, (list, tuple)):
        return False
    # Not a pair of betas for a pair of parameters.
    is_long = len(value) > _MOST_COEFFICIENTS and or_more and len(value) >= min(numbers)
    is_as_long = len(value) in numbers and (isinstance(value, list) or len(value) > _MOST_COEFFICIENTS)
    # A trial shows whether entries that differ belong to places.
    are_alike = any(same(*pair) for pair in itertools.pairwise(value[:3]))
    return (is_long or is_as_long) and (are_alike or len(value) == 1)


def _unknown_attribute(optimizer: Optimizer) -> str | None:
    """Name of an attribute that may hold parameters, an optimizer, or anything that a clone would share; or None."""
    # The last two are those of a GradScaler, during a step.
    usual = vars(torch.optim.SGD([torch.zeros(1, device="cpu")])).keys() | {"grad_scale", "found_inf"}
    storages = {place.storage for p in optimizer_parameters(optimizer) if (place := memory_of(p)) is not None}
    for name, value in attributes_of(optimizer).items():
        if name not in usual and not is_exhausted(value) and not _is_setting(value, storages):
            return name
    return None


def _is_setting(value: Any, storages: set[int]) -> bool:
    return copyable(value, Tensor) and all(
        tensor.numel() <= _MOST_ELEMENTS and (place := memory_of(tensor)) is not None and place.storage not in storages
        for tensor in tensors_in(value)
    )


def _why_settings_may_change(optimizer: Optimizer, found: Outside) -> str | None:
    """Describe a setting that a snapshot cannot copy, so that a deferred update would read its later value; or None."""
    for group in optimizer.param_groups:
        for key, value in hyperparameters(group).items():
            if not copyable(value, Tensor):
                return (
                    f"its param groups hold a {type(value).__name__} in {key!r}, which cannot be copied for a deferred "
                    "update. Use numbers, strings or tensors"
                )
        for parameter in group["params"] if reads_attributes(optimizer) else ():
            for name, value in vars(parameter).items():
                if not copyable(value, Tensor):
                    return (
                        f"a parameter has a {type(value).__name__} in .{name}, which cannot be copied for a deferred "
                        "update. Use numbers, strings or tensors"
                    )
    if found.unknown is not None:
        reads = f"its step() reads {found.unknown}"
        return f"{reads}, which may change before a deferred update runs. Pass it in a param group"
    if (reason := why_names_matter(optimizer, found)) is not None:
        return reason
    if "torch.compile" in found.mentions:
        return "its step() runs compiled functions, which cannot be watched: torch runs them uncompiled then"
    return None


def why_no_copy(optimizer: Optimizer, counters: Set[str]) -> str | None:
    """Why deferred updates could not begin with what steps change, as it is in this step; None if they can.

    Args:
        optimizer: the optimizer.
        counters: what its steps change, by the names that ``separability`` gives it. A change of others is seen.
    """
    if not counters and is_of_torch(optimizer):
        return None  # the usual case, in each step
    changed = [
        (f"its attribute {name}" if name.startswith(".") else f"{name!r} in a param group", settings[name])
        for settings in (*optimizer.param_groups, dotted_attributes(optimizer))
        for name in sorted(counters)
        if name in settings
    ]
    # Not what a LazyState does, which would apply pending updates.
    entries = dict.items(optimizer.state)
    changed += [(f"its state under {key!r}", value) for key, value in entries if not isinstance(key, Tensor)]
    changed += [
        (f"the attribute .{name} of a parameter", value)
        for parameter in (optimizer_parameters(optimizer) if reads_attributes(optimizer) else ())
        for name, value in vars(parameter).items()
    ]
    for what, value in changed:
        if not copyable(value, Tensor):
            return f"{what} holds a {type(value).__name__} that cannot be copied for a deferred update"
    return None


def _knows_parameters_by_id(optimizer: Optimizer, found: Outside) -> bool:
    """Whether it knows ids of parameters; deferred updates use other tensors of that memory, with other ids."""
    ids = set(map(id, optimizer_parameters(optimizer)))
    own = list(attributes_of(optimizer).values())
    elsewhere = [value for _, value in found.values.items()]
    return not ids.isdisjoint(_integers((own, list(map(hyperparameters, optimizer.param_groups)), elsewhere)))


_ID_DIGITS = 20  # of an address of 64 bits


def _integers(value: Any) -> Iterator[int]:
    """All integers in nested containers, including keys of dicts, and those that are written as strings."""
    for each in walk(value, _with_keys):
        if isinstance(each, int) or (isinstance(each, str) and each.isdecimal() and len(each) <= _ID_DIGITS):
            yield int(each)


def _with_keys(value: Any) -> Collection[Any]:
    return [*dict.keys(value), *dict.values(value)] if isinstance(value, dict) else parts_of(value)
