"""Ranks whose gradients differ agree on whether any of them has overflowed, so that all skip the same steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.collectives.link import Link

_links: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Link]] = weakref.WeakKeyDictionary()


def agree_on_overflow(optimizers: Sequence[Optimizer], link: Link) -> None:
    """From now on :func:`agreed` asks all ranks of this link."""
    for optimizer in optimizers:
        _links[optimizer] = weakref.ref(link)


def agreed(optimizer: Optimizer, found_inf: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
    """What `found_inf` is if ranks agree: 1 where any rank has found an overflow. A collective if ranks have to."""
    link = _links[optimizer]() if optimizer in _links else None
    if link is None or link.is_closed:
        return found_inf
    return {device: link.all_gather_small(found).amax(dim=0) for device, found in found_inf.items()}
