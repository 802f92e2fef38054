"""The largest elements of a slice in magnitude and their indices; all others are left out.

Payload: the values in fp32, then the indices: 32 bits each, or 16 bits inside of chunks of 4096 elements, from which
always equally many are taken. How many depends on the slice's length, the density and the selector, never on the
values, so that every rank knows the size of every message.

Magnitudes are compared as integers, the bits of ``|x|``: they have the same order as the numbers, with NaN above
infinity. So an entry that is not finite is selected before all finite ones, and a NaN reaches every rank.
"""

from __future__ import annotations

import enum
import functools

import numpy as np
import torch
from torch import Tensor

from ddp_crossover.addons.codes.codec import Codec, add_residual, all_finite

PLACE_BITS = 12  # that name a place inside a chunk
CHUNK_NUMEL = 1 << PLACE_BITS
# EXACT on CPU sorts magnitudes into bins by their upper bits: how many lower bits to shift out, and the number of bins.
# The exponent stays, and 4 bits of the mantissa: 16 bins for each power of 2.
_BIN_SHIFT, _BINS = 19, 2**12


class Selector(enum.StrEnum):
    """How the largest entries are found.

    Attributes:
        EXACT: the largest entries of the slice; of equal ones those with the lowest indices.
        CHUNKED: the largest entries of each chunk of 4096. Magnitudes that differ by less than 1 part in 2048 may count
            as equal; of equal ones those with the lowest indices.
    """

    EXACT = "exact"
    CHUNKED = "chunked"


def selected_numel(numel: int, density: float, selector: Selector) -> int:
    """How many entries of a slice of ``numel`` are selected.

    That is ``density * numel``, rounded, and at least 1 if neither is 0; ``CHUNKED`` rounds in each chunk of 4096.

    Example:
        >>> selected_numel(10_000, 0.01, Selector.EXACT), selected_numel(10_000, 0.01, Selector.CHUNKED)
        (100, 100)
    """
    if selector is Selector.CHUNKED:
        chunks, rest = divmod(numel, CHUNK_NUMEL)
        return chunks * _rounded(CHUNK_NUMEL, density) + _rounded(rest, density)
    return _rounded(numel, density)


def select(values: Tensor, density: float, selector: Selector) -> Tensor:
    """Indices of entries that are largest in magnitude, or close to it.

    If any entry is not finite, at least one such entry is among the selected. On a GPU the host does not wait.

    Args:
        values: flat, fp32, on any device.
        density: the fraction of entries to select.
        selector: how to select.

    Returns:
        Exactly ``selected_numel(values.numel(), density, selector)`` different indices, int64, ascending, on the device
        of ``values``.

    Example:
        >>> select(torch.tensor([1.0, -3.0, 0.0, 2.0]), 0.5, Selector.EXACT)
        tensor([1, 3])
    """
    assert values.dim() == 1 and values.dtype is torch.float32, (values.shape, values.dtype)
    numel = values.numel()
    k = selected_numel(numel, density, selector)
    if k == 0 or k == numel:
        return torch.arange(k, device=values.device)
    return _largest_of_chunks(values, density) if selector is Selector.CHUNKED else _largest(values, k)


def _rounded(numel: int, density: float) -> int:
    return max(round(density * numel), 1) if numel and density else 0


def _magnitude_bits(values: Tensor, mask: int = -1) -> Tensor:
    """The bits of ``|values|`` that are set in ``mask``, as int32."""
    return values.view(torch.int32) & (torch.iinfo(torch.int32).max & mask)


# --- EXACT


def _largest(values: Tensor, k: int) -> Tensor:
    bits = _magnitude_bits(values)
    if not values.is_cpu:
        return _pick(bits, k, bits.topk(k, sorted=False).values.amin())
    # A top-k of the whole slice takes several times as long on CPU as to count magnitudes by their upper bits, and then
    # to leave out all that are certainly too small.
    counts = torch.bincount(bits >> _BIN_SHIFT, minlength=_BINS).flip(0).cumsum(0)  # entries in this bin or above it
    from_top = int(torch.searchsorted(counts, k))
    k_above = int(counts[from_top - 1]) if from_top else 0
    low = (_BINS - 1 - from_top) << _BIN_SHIFT
    places = torch.from_numpy(np.flatnonzero((bits >= low).numpy()))  # five times as fast as `nonzero`
    bits = bits[places]
    boundary_bin = bits if k_above == 0 else bits[bits < low + (1 << _BIN_SHIFT)]
    return places[_pick(bits, k, boundary_bin.topk(k - k_above, sorted=False).values.amin())]


def _pick(bits: Tensor, k: int, threshold: Tensor) -> Tensor:
    """Ascending indices of the ``k`` largest, given the smallest of these; of equal ones the lowest indices."""
    above, equal = bits > threshold, bits == threshold
    wanted = k - above.sum()
    return torch.nonzero_static(above | (equal & (equal.cumsum(0) <= wanted)), size=k).view(-1)


# --- CHUNKED


def _largest_of_chunks(values: Tensor, density: float) -> Tensor:
    whole = values.numel() // CHUNK_NUMEL * CHUNK_NUMEL
    parts = []
    if whole:
        parts.append(_largest_of_rows(values[:whole].view(-1, CHUNK_NUMEL), density))
    if whole < values.numel():
        parts.append(_largest_of_rows(values[whole:].view(1, -1), density) + whole)
    return torch.cat(parts)


def _largest_of_rows(rows: Tensor, density: float) -> Tensor:
    """Indices into the flat ``rows``, at most 4096 wide, ascending."""
    # The place in the row, counted from the end, replaces the 12 lowest bits of each magnitude. So no two are equal, of
    # almost equal ones the first is the largest, and top-k returns the places without a gather.
    height, width = rows.shape
    last = CHUNK_NUMEL - 1
    bits = _magnitude_bits(rows, ~last)
    bits |= torch.arange(last, last - width, -1, dtype=bits.dtype, device=bits.device)
    largest = bits.topk(_rounded(width, density), dim=1, sorted=False).values
    places = (last - (largest & last)).sort(dim=1).values
    return (places + torch.arange(0, height * width, width, device=rows.device).unsqueeze(1)).view(-1)


_VALUE_BYTES = torch.float32.itemsize


class TopKCodec(Codec):
    """Sends the part ``density`` of the elements.

    Args:
        density: above 0, at most 1.
        selector: how they are found.
    """

    is_sparse = True

    def __init__(self, density: float, selector: Selector) -> None:
        self.density = density
        self._selector = selector
        self._index_dtype = torch.int16 if selector is Selector.CHUNKED else torch.int32

    def with_density(self, density: float) -> TopKCodec:
        return type(self)(density, self._selector)

    def payload_bytes(self, numel: int) -> int:
        return self._selected(numel) * (_VALUE_BYTES + self._index_dtype.itemsize)

    def encode(self, values: Tensor, residual: Tensor | None, left_out: Tensor, payload: Tensor) -> None:
        add_residual(values, residual, left_out)
        chosen = select(left_out, self.density, self._selector)
        sent, places = self._split(payload)
        torch.index_select(left_out, 0, chosen, out=sent)
        base = self._bases(values.numel(), values.device)
        places.copy_(chosen if base is None else chosen - base)
        left_out.index_fill_(0, chosen, 0.0)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.zero_()
        sent, _ = self._split(payload)
        out.index_copy_(0, self._indices(payload, out), sent)

    def add(self, payload: Tensor, total: Tensor) -> None:
        # Indices occur once, so that the order of additions does not matter.
        sent, _ = self._split(payload)
        total.index_add_(0, self._indices(payload, total), sent)

    def is_finite(self, payload: Tensor) -> Tensor:
        return all_finite(self._split(payload)[0])

    def _selected(self, numel: int) -> int:
        return selected_numel(numel, self.density, self._selector)

    def _split(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        count = payload.numel() // (_VALUE_BYTES + self._index_dtype.itemsize)
        values, places = payload.split([count * _VALUE_BYTES, count * self._index_dtype.itemsize])
        return values.view(torch.float32), places.view(self._index_dtype)

    def _indices(self, payload: Tensor, like: Tensor) -> Tensor:
        places = self._split(payload)[1].long()
        base = self._bases(like.numel(), like.device)
        return places if base is None else places + base

    def _bases(self, numel: int, device: torch.device) -> Tensor | None:
        """First element of the chunk of each selected one; None if indices are those of the slice."""
        if self._selector is not Selector.CHUNKED:
            return None
        return _chunk_starts(numel, self._selected(min(numel, CHUNK_NUMEL)), self._selected(numel), device)


@functools.lru_cache(maxsize=256)
def _chunk_starts(numel: int, of_each: int, selected: int, device: torch.device) -> Tensor:
    chunks = -(-numel // CHUNK_NUMEL)
    starts = torch.arange(chunks, device=device) * CHUNK_NUMEL
    return starts.repeat_interleave(of_each)[:selected]
