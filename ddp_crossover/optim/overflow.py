"""Ranks whose gradients differ agree on whether any of them has overflowed, so that all skip the same steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.collectives.link import Link

# Nothing here keeps the object alive to which `steps` belongs: it has the optimizer, which would then never be dropped.
_links: weakref.WeakKeyDictionary[Optimizer, tuple[weakref.ref[Link], weakref.WeakMethod[Callable[[], int]]]] = (
    weakref.WeakKeyDictionary()
)


def agree_on_overflow(optimizers: Sequence[Optimizer], link: Link, steps: Callable[[], int]) -> None:
    """From now on :func:`agreed` asks all ranks of this link, which must have made as many ``steps()``, a method."""
    for optimizer in optimizers:
        _links[optimizer] = weakref.ref(link), weakref.WeakMethod(steps)


def agreed(optimizer: Optimizer, found_inf: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
    """What `found_inf` is if ranks agree: 1 where any rank has found an overflow. A collective if ranks have to.

    Raises:
        RuntimeError: on all ranks, if they are in different steps.
    """
    link_of, steps_of = _links.get(optimizer, (lambda: None, lambda: None))
    link, steps = link_of(), steps_of()
    if link is None or link.is_closed or steps is None:
        return found_inf
    together = {}
    for device, found in found_inf.items():
        rows = link.all_gather_small(torch.stack([found.flatten()[0], found.new_tensor(steps())]))
        if (rows[:, 1] != rows[0, 1]).any():
            raise RuntimeError(
                "ranks unscale gradients of different steps, because some have left out scaler.step() in one: call it "
                "on all ranks in each step; it skips the step by itself on all of them if one has an overflow"
            )
        together[device] = rows[:, 0].amax().view_as(found)
    return together
