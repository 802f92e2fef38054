"""Checks that all ranks have the same gradients before each updates its shards with its own copy of them.

A gradient that no reduction has written is each rank's own: of a backward under ``no_sync()``, of a second backward
that DDP does not reduce, of a parameter that DDP has lost sight of. Plain DDP's ranks go apart then; shards of it would
make a model that nobody has asked for. A script may as well have averaged it by itself, so values are compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ddp_crossover.collectives.agreement import all_gather_json
from ddp_crossover.collectives.link import Link

# Different devices may round what they compute of equal gradients, such as the factor of clipping, differently.
_ROUNDING = 1e-3
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 2**61 - 1


@torch.no_grad()
def require_same_gradients(link: Link, device: torch.device, gradients: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError on all ranks unless these gradients, given by name, are the same on all. A collective."""
    number = 0
    for name, gradient in gradients.items():
        number = (number * 1_000_003 + _bits(gradient) + len(name)) % _MODULUS
    if len(set(link.exchange_numbers(number)())) == 1:
        return
    sizes = {name: [float(gradient.sum()), float(gradient.abs().sum())] for name, gradient in gradients.items()}
    of_ranks = all_gather_json(sizes, link.process_group, device)
    for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
        first, *others = (of_rank.get(name) for of_rank in of_ranks)
        if not all(_is_about(first, other) for other in others):
            raise RuntimeError(
                f"optimizer.step() found a gradient of {name} that is not the same on all ranks, because no reduction "
                "has written it (a backward in no_sync() or through ddp.module, a second backward that DDP does not "
                "reduce, a parameter that has been parametrized, or has had another dtype or device, since DDP was "
                "built) or ranks have changed it differently. With shard_optimizer=True it would be put together of "
                "the gradients of all: add up losses before one backward, average .grad over ranks before step(), or "
                "leave out shard_optimizer, where each rank goes its own way"
            )


def _bits(gradient: Tensor) -> int:
    """A sum of the bits of all elements, in any order."""
    return int(gradient.detach().contiguous().view(_INTEGERS[gradient.element_size()]).sum(dtype=torch.int64))


def _is_about(first: list[float] | None, other: list[float] | None) -> bool:
    if first is None or other is None:
        return first is other
    least = _ROUNDING * abs(first[1])
    return all(abs(a - b) <= least or a == b or (a != a and b != b) for a, b in zip(first, other, strict=True))
