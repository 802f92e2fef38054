"""Memory of the fusion buffers, for whatever plan comes: made at attach, before activations and optimizer state.

The first plan comes in the middle of a backward, when the device is as full as it will ever be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_crossover.collectives.link import Link
from ddp_crossover.collectives.wire import travels_as
from ddp_crossover.fusion import GradientSpec, arena_capacity


def make_arenas(
    specs: Sequence[GradientSpec],
    named: Sequence[tuple[str, torch.nn.Parameter]],
    link: Link,
    wire_dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """Arenas that every plan fits into, uninitialized; on CPU, memory that costs nothing until it is used.

    Also has the link make whatever it would else make at its first legs. Every rank must call it.

    Args:
        specs: the gradients.
        named: their parameters, in the same order.
        link: what will send them.
        wire_dtype: what wider gradients are cast to on the wire, or None.
    """
    like = {spec.arena: parameter for spec, (_, parameter) in zip(specs, named, strict=True)}
    arenas = {
        arena: torch.empty(numel, dtype=travels_as(like[arena].dtype, wire_dtype), device=like[arena].device)
        for arena, numel in arena_capacity(specs, link.world_size).items()
    }
    for arena in arenas.values():
        link.adopt(arena)
    link.prepare(max(arenas.values(), key=lambda arena: arena.nbytes))
    return arenas
