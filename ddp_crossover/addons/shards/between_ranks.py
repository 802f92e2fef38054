"""What ranks with shards exchange: ranges of tensors, sums over whole layers, and whether they hold the same.

[Note: gradients that no reduction has written]
They are each rank's own: of a backward under ``no_sync()``, of a second backward that DDP does not reduce, of a
parameter that DDP has lost sight of. Plain DDP's ranks go apart then; shards of it would make a model that nobody has
asked for. A script may as well have averaged it by itself, so values are compared.

[Note: parameters that a script has written]
Under plain DDP a rank's update is added to what that rank holds, and a script may let ranks go apart and average them
later. Ranks with shards make one update, to the values of one rank, so all must hold the same when ``step()`` is
called. A write raises the version of a parameter's memory, which costs nothing to see; only what was written is summed
up, and the sum travels with the number that ranks exchange in ``step()`` anyway. A write through ``p.data`` raises no
version: with ``strict=True`` all parameters are summed up.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover.addons.shards.ownership import Ownership, ParameterRange, transfers
from ddp_crossover.comm.agreement import all_gather_json
from ddp_crossover.comm.link import Link
from ddp_crossover.pending.flat import sum_of_bits, table_of

# At most about this much is exchanged at a time, because what is sent and received takes memory of its own.
EXCHANGE_BYTES = 8 * 2**20
T = TypeVar("T")


def in_chunks(items: Iterable[T], kind_of: Callable[[T], object], bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Items of one kind, and not too many bytes at a time; items of a kind must stand together."""
    chunk: list[T] = []
    held_bytes = 0
    for item in items:
        item_bytes = bytes_of(item)
        if chunk and (kind_of(item) != kind_of(chunk[0]) or held_bytes + item_bytes > EXCHANGE_BYTES):
            yield chunk
            chunk, held_bytes = [], 0
        chunk.append(item)
        held_bytes += item_bytes
    if chunk:
        yield chunk


def redistribute(
    link: Link, have: Ownership, want: Ownership, mine: Mapping[ParameterRange, Tensor], like: Tensor
) -> Iterator[tuple[ParameterRange, Tensor]]:
    """Send every rank what it wants. A collective; blocks the host on gloo, and the current stream on NCCL.

    Args:
        link: link between the ranks.
        have: which rank has what.
        want: which rank wants what.
        mine: flat tensors of this rank's ranges.
        like: a tensor of the dtype and device of all values.

    Yields:
        The ranges that this rank wanted, cut as they were sent, with their values as flat tensors.
    """
    moves, rank = transfers(have, want), link.rank
    held = by_parameter(mine)
    item_bytes = like.element_size()
    # As bytes: gloo does not know every dtype.
    outgoing = [elements_of(held, each) for to_one in moves[rank] for each in to_one]
    sent = torch.cat([like.new_empty(0), *outgoing]).view(torch.uint8)
    numels = [sum(each.numel for each in of_one[rank]) for of_one in moves]
    received = sent.new_empty(sum(numels) * item_bytes)
    dist.all_to_all_single(
        received,
        sent,
        [numel * item_bytes for numel in numels],
        [sum(each.numel for each in to_one) * item_bytes for to_one in moves[rank]],
        group=link.process_group,
    )
    link.meter.sent(sum(each.numel for to, one in enumerate(moves[rank]) for each in one if to != rank) * item_bytes)
    values, begin = received.view(like.dtype), 0
    for of_one in moves:
        for each in of_one[rank]:
            yield each, values[begin : begin + each.numel]
            begin += each.numel


def by_parameter(of_ranges: Mapping[ParameterRange, Tensor]) -> dict[int, list[tuple[ParameterRange, Tensor]]]:
    """Flat tensors of ranges, to find some elements in them with :func:`elements_of`."""
    found: dict[int, list[tuple[ParameterRange, Tensor]]] = {}
    for each, values in of_ranges.items():
        found.setdefault(each.parameter, []).append((each, values))
    return found


def elements_of(held: Mapping[int, list[tuple[ParameterRange, Tensor]]], part: ParameterRange) -> Tensor:
    """A view of these elements, which one of the ranges has."""
    whole, values = next(one for one in held[part.parameter] if one[0].start <= part.start < one[0].stop)
    return values[part.start - whole.start : part.stop - whole.start]


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


# Different devices may round what they compute of equal gradients, such as the factor of clipping, differently.
_ROUNDING = 1e-3
_MODULUS = 2**31 - 1  # a prime: numbers have 31 bits


def number_of(tensors: Mapping[str, Tensor]) -> int:
    """A number that is the same for the same tensors, by name; 0 if there are none."""
    number = 0
    for name, tensor in tensors.items():
        number = (number * 1_000_003 + sum_of_bits(tensor) + zlib.crc32(name.encode()) + 1) % _MODULUS
    return number


def require_same_parameters(
    link: Link, device: torch.device, written: Iterable[str], every: Mapping[str, Tensor]
) -> None:
    """Raise RuntimeError on all ranks unless they hold the same in what any of them has written. A collective.

    Args:
        link: link between the ranks.
        device: device of the parameters.
        written: names of the parameters that the script has written on this rank.
        every: the memory of all parameters, by name.
    """
    names = sorted({name for of_rank in all_gather_json([*written], link.process_group, device) for name in of_rank})
    sums = all_gather_json([sum_of_bits(every[name]) for name in names], link.process_group, device)
    for name, *of_ranks in zip(names, *sums, strict=True):
        if len(set(of_ranks)) > 1:
            raise RuntimeError(
                f"{name} is not the same on all ranks before optimizer.step(), because they have changed it "
                "differently. With shard_optimizer=True the values of one rank would replace those of the others: "
                "average it over ranks before step(), change it alike on all ranks, or leave out shard_optimizer, "
                "where each rank goes its own way"
            )


@torch.no_grad()
def require_same_gradients(link: Link, device: torch.device, gradients: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError on all ranks unless these gradients, given by name, are about the same. A collective."""
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


def _is_about(first: list[float] | None, other: list[float] | None) -> bool:
    if first is None or other is None:
        return first is other
    least = _ROUNDING * abs(first[1])
    return all(abs(a - b) <= least or a == b or (a != a and b != b) for a, b in zip(first, other, strict=True))
