"""Sums over whole layers, of which each rank has some shards (PTO, Shi et al., MLSys 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddp_crossover.collectives.link import Link
from ddp_crossover.parameters.flat import table_of


def sums_over_ranks(
    link: Link,
    device: torch.device,
    layers: Sequence[int],
    layer_of: Mapping[int, int],
    shards: Sequence[Tensor],
    sums: Tensor,
) -> Tensor:
    """Add up what ranks have computed of their shards, in rank order, for one small exchange altogether.

    Args:
        link: link between the ranks.
        device: device of the shards.
        layers: all parameters that are being updated, the same on every rank.
        layer_of: the parameter of each shard, by ``id()`` of the shard.
        shards: this rank's shards; may be none.
        sums: what it has computed, shape ``(len(shards), k)``, float64.

    Returns:
        For each shard the sums of its layer, of the same shape.
    """
    of_layers: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for shard, of_shard in zip(shards, sums.to(device).unbind(), strict=True):
        of_layers[layer_of[id(shard)]].append(of_shard)
    nothing = torch.zeros(sums.shape[1], dtype=torch.float64, device=device)
    # One column per shard of a layer, and a sum over columns: adding into one place has no fixed order on CUDA.
    table = table_of([*of_layers.values()], nothing)
    of_ranks = link.all_gather_small(table.sum(dim=1))
    total = of_ranks[0].clone()
    for of_rank in of_ranks[1:]:
        total += of_rank
    of_layer = dict(zip(layers, total.unbind(), strict=True))
    return torch.stack([of_layer[layer_of[id(shard)]] for shard in shards]) if shards else total[:0]
