"""Tells whether gradients have been written, whatever has become of the tensors that held them.

A gradient in ``.grad`` may be added to, zeroed in place, replaced, or dropped and made anew, perhaps at the same
address. Autograd writes through a ``PendingGrad``, users write to the gradient that it stands for, and each counts its
own writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.pending.pending_gradient import resolved


class Mark(NamedTuple):
    """A gradient at one moment: the tensor object, and how often it was written, by autograd and by others."""

    tensor: weakref.ref[Tensor]
    version: int
    version_of_value: int


def marks_of(parameters: Iterable[Tensor]) -> list[Mark | None]:
    """The gradients of these parameters as they are now, None where there is none. Waits for those on the wire."""
    return [None if parameter.grad is None else _mark(parameter.grad) for parameter in parameters]


def _mark(gradient: Tensor) -> Mark:
    return Mark(weakref.ref(gradient), version_of(gradient), version_of(resolved(gradient)))


def version_of(gradient: Tensor | None) -> int:
    """How often this tensor object was written, which for a ``PendingGrad`` counts what autograd and DDP write."""
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if gradient is None else gradient._version


def are_same(before: Iterable[Mark | None], after: Iterable[Mark | None]) -> bool:
    """Whether no gradient has been written, made or dropped in between."""
    return all(map(_is_same, before, after))


def _is_same(before: Mark | None, after: Mark | None) -> bool:
    if before is None or after is None:
        return before is after
    # Not `==`, which compares values; a tensor has one reference object as long as it lives.
    return before.tensor is after.tensor and before[1:] == after[1:]


def are_empty(parameters: Iterable[Tensor]) -> bool:
    """Whether every gradient of these parameters is None or zero. Waits for those on the wire."""
    gradients = (parameter.grad for parameter in parameters)
    return all(gradient is None or not gradient.any() for gradient in gradients)
