"""Allocates the arenas for any plan at attach, before activations and optimizer state take memory.

The first plan is made during a backward, when the device's memory is fullest. An arena takes copies of gradients, where
these cannot travel from DDP's buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.codecs.wire import Wire
from ddp_crossover.collectives.link import Link
from ddp_crossover.fusion import GradientSpec, arena_capacity
from ddp_crossover.fusion_buffers.in_place import travels_in_place


class ArenaMemory(NamedTuple):
    """What an arena is made of."""

    dtype: torch.dtype
    device: torch.device


def make_arenas(
    specs: Sequence[GradientSpec],
    parameters: Sequence[torch.nn.Parameter],
    link: Link,
    wire: Wire,
) -> dict[str, Tensor]:
    """Allocate arenas that are large enough for every plan; uninitialized, so on CPU they take no memory until used.

    Args:
        specs: the gradients.
        parameters: their parameters, in the same order.
        link: the link that will carry the gradients.
        wire: what gradients are on the wire.

    Returns:
        A flat tensor for each arena that is needed, in its wire dtype.
    """
    numel = arena_capacity(specs, link.world_size, link.shard_align_bytes)
    return {
        arena: torch.empty(numel[arena], dtype=memory.dtype, device=memory.device)
        for arena, memory in memory_of_arenas(specs, parameters, link, wire).items()
    }


def memory_of_arenas(
    specs: Sequence[GradientSpec], parameters: Sequence[torch.nn.Parameter], link: Link, wire: Wire
) -> dict[str, ArenaMemory]:
    """The arenas that are needed, because their gradients do not travel in place; arguments as above."""
    like = {spec.arena: (spec, parameter) for spec, parameter in zip(specs, parameters, strict=True)}
    return {
        arena: ArenaMemory(wire.travels_as(parameter.dtype, is_coded=spec.is_coded), parameter.device)
        for arena, (spec, parameter) in like.items()
        if not travels_in_place(parameter.dtype, link, wire)
    }
