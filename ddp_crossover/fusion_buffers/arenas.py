"""Allocates the arenas for any plan at attach, before activations and optimizer state take memory.

The first plan is made during a backward, when the device's memory is fullest. An arena takes copies of gradients, where
these cannot travel from DDP's buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.codecs.coding import Coding
from ddp_crossover.codecs.wire import Wire
from ddp_crossover.collectives.fusion_buffer import FusionBuffer
from ddp_crossover.collectives.link import Link
from ddp_crossover.fusion import GradientSpec, arena_capacity
from ddp_crossover.fusion_buffers.in_place import travels_in_place
from ddp_crossover.parameters.slots import GroupInFlight

_SPARE_NUMEL = 2**14


class ArenaMemory(NamedTuple):
    """What an arena is made of."""

    dtype: torch.dtype
    device: torch.device


def make_arenas(
    specs: Sequence[GradientSpec],
    parameters: Sequence[torch.nn.Parameter],
    link: Link,
    wire: Wire,
    *,
    lands: bool = False,
) -> dict[str, Tensor]:
    """Allocate arenas that are large enough for every plan; uninitialized, so on CPU they take no memory until used.

    Args:
        specs: the gradients.
        parameters: their parameters, in the same order.
        link: the link that will carry the gradients.
        wire: what gradients are on the wire.
        lands: whether gather legs bring parameters, which need arenas of their own where gradients travel in another
            dtype.

    Returns:
        A flat tensor for each arena that is needed, in its wire dtype; for each :func:`landing_of`, in the parameters'.
    """
    numel = arena_capacity(specs, link.world_size, link.shard_align_bytes)
    needed = memory_of_arenas(specs, parameters, link, wire)
    if lands:
        dtypes = {spec.arena: parameter.dtype for spec, parameter in zip(specs, parameters, strict=True)}
        needed |= {
            landing_of(arena): ArenaMemory(dtypes[arena], memory.device)
            for arena, memory in needed.items()
            if dtypes[arena] is not memory.dtype
        }
        numel |= {landing_of(arena): size for arena, size in numel.items()}
    return {
        arena: torch.empty(numel[arena], dtype=memory.dtype, device=memory.device) for arena, memory in needed.items()
    }


def landing_of(arena: str) -> str:
    """The name of the arena in which updated parameters arrive whose gradients travel in ``arena``."""
    return f"{arena}, landing"


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


def lay_out_in_arena(
    group: GroupInFlight,
    arena: Tensor,
    starts: Sequence[int],
    owners: Mapping[int, int] = MappingProxyType({}),
    coding: Coding | None = None,
) -> None:
    """Make the fusion buffer of a group whose gradients are copied to an arena.

    Args:
        group: the group.
        arena: the arena.
        starts: where its pieces begin in its range of the arena.
        owners: the ranks that reduce whole gradients, by parameter; either all of the group's have one, or none.
        coding: what its slices travel as; None: as they are.
    """
    spec = group.spec
    memory = arena.narrow(0, spec.offset, spec.numel)
    owned_by = tuple(owners[slot.index] for slot in group.slots if slot.index in owners)
    if not owned_by:
        group.lay_out(FusionBuffer((memory,), coding=coding), [(0, start) for start in starts])
        return
    parts = tuple(memory[start : start + piece.numel] for start, piece in zip(starts, spec.pieces, strict=True))
    group.lay_out(FusionBuffer(parts, owners=owned_by), [(part, 0) for part in range(len(parts))])


def whole_of(arena: Tensor) -> Tensor:
    """All the memory that :func:`zeros` was given for an arena."""
    return arena._base if arena._base is not None else arena


def zeros(numel: int, dtype: torch.dtype, device: torch.device, memory: Tensor | None) -> Tensor:
    """Return ``numel`` flat zeros, in ``memory`` if that is large enough."""
    if memory is not None and memory.numel() >= numel:
        return memory[:numel].zero_()
    # Plans differ in their padding: the spare elements let the next plan's arena fit in the same memory.
    return torch.zeros(numel + _SPARE_NUMEL, dtype=dtype, device=device)[:numel]
