"""Copies of whatever a loop shows, and a comparison of two of them bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def snapshot(value: Any) -> Any:
    """A deep copy in plain tensors, of nested dicts and sequences, that later steps do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().to_dense().clone().as_subclass(torch.Tensor)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [snapshot(item) for item in value]
    return value


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of everything in nested dicts and lists."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def first_difference(actual: Any, expected: Any) -> str | None:
    """Where and how two snapshots differ first; None where they are the same in every bit."""
    actual_leaves, expected_leaves = dict(leaves(actual)), dict(leaves(expected))
    for path, wanted in expected_leaves.items():
        if path not in actual_leaves:
            return f"{path} is missing"
        difference = _difference(actual_leaves[path], wanted)
        if difference:
            return f"{path}: {difference}"
    extra = sorted(actual_leaves.keys() - expected_leaves.keys())
    return f"{extra} only with ddp_crossover" if extra else None


def _difference(actual: Any, wanted: Any) -> str | None:
    if type(actual) is not type(wanted):
        return f"{type(actual).__name__}, not {type(wanted).__name__}"
    if not isinstance(wanted, torch.Tensor):
        # repr: a NaN is not equal to itself.
        return None if repr(actual) == repr(wanted) else f"{actual!r}, not {wanted!r}"
    for what in ("dtype", "shape", "requires_grad"):
        if getattr(actual, what) != getattr(wanted, what):
            return f"{what} is {getattr(actual, what)}, not {getattr(wanted, what)}"
    if actual.stride() != wanted.stride() and actual.numel() > 1:
        return f"stride is {actual.stride()}, not {wanted.stride()}"
    if torch.equal(_bytes(actual), _bytes(wanted)):
        return None
    return f"by up to {(actual.double() - wanted.double()).abs().max():.3g}: {_start(actual)}, not {_start(wanted)}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A copy: one element passes for contiguous with any stride, and then has no bytes to show.
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _start(tensor: torch.Tensor) -> list[Any]:
    return tensor.reshape(-1)[:3].tolist()
