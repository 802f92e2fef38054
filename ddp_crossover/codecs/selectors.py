"""Selects the entries of a slice that are largest in magnitude, for sending only these.

Pure: tensor in, indices out. The number of indices depends on the slice's length, the density and the selector, never
on the values, so that every rank knows the size of every message. Knows nothing of ranks, residuals or the wire.

Magnitudes are compared as integers, the bits of ``|x|``: they have the same order as the numbers, with NaN above
infinity. So an entry that is not finite is selected before all finite ones, and a NaN reaches every rank.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

# 12 bits name a place inside a chunk.
CHUNK_NUMEL = 2**12
MSTOPK_ITERATIONS = 30
# EXACT on CPU sorts magnitudes into bins by their upper bits: how many lower bits to shift out, and the number of bins.
# The exponent stays, and 4 bits of the mantissa: 16 bins for each power of 2.
_BINS = {torch.float32: (19, 2**12), torch.float64: (48, 2**15)}


class Selector(enum.StrEnum):
    """How the largest entries are found.

    Attributes:
        AUTO: ``CHUNKED`` on CPU, ``EXACT`` elsewhere. Ask :meth:`on` which of them it is.
        EXACT: the largest entries of the slice; of equal ones those with the lowest indices.
        CHUNKED: the largest entries of each chunk of 4096. Magnitudes that differ by less than 1 part in 2048 may count
            as equal; of equal ones those with the lowest indices.
        MSTOPK: a binary search for the threshold (Shi et al., MLSys 2021, arXiv 2010.10458, algorithm 1). All entries
            above a threshold that slightly too few exceed, and a random window of those just below it.
    """

    AUTO = "auto"
    EXACT = "exact"
    CHUNKED = "chunked"
    MSTOPK = "mstopk"

    def on(self, device_type: str) -> Selector:
        """This selector, or what ``AUTO`` stands for on ``"cpu"``, ``"cuda"`` and so on."""
        if self is not Selector.AUTO:
            return self
        return Selector.CHUNKED if device_type == "cpu" else Selector.EXACT


def selected_numel(numel: int, density: float, selector: Selector) -> int:
    """How many entries of a slice of ``numel`` are selected.

    That is ``density * numel``, rounded, and at least 1 if neither is 0; ``CHUNKED`` rounds in each chunk of 4096.

    Raises:
        ValueError: for a density outside of [0, 1], or for ``Selector.AUTO``, which differs between devices.

    Example:
        >>> selected_numel(10_000, 0.01, Selector.EXACT), selected_numel(10_000, 0.01, Selector.CHUNKED)
        (100, 100)
    """
    if not 0 <= density <= 1:
        raise ValueError(f"density must be between 0 and 1 (the fraction of entries to select), got {density}")
    if selector is Selector.AUTO:
        raise ValueError("selector='auto' differs between devices: pass selector.on(device_type)")
    if selector is Selector.CHUNKED:
        chunks, rest = divmod(numel, CHUNK_NUMEL)
        return chunks * _rounded(CHUNK_NUMEL, density) + _rounded(rest, density)
    return _rounded(numel, density)


def select(
    values: Tensor,
    density: float,
    selector: Selector,
    *,
    generator: torch.Generator | None = None,
    mstopk_iterations: int = MSTOPK_ITERATIONS,
) -> Tensor:
    """Indices of entries that are largest in magnitude, or close to it.

    If any entry is not finite, at least one such entry is among the selected. On a GPU the host does not wait for
    ``EXACT`` and ``CHUNKED``; it does for ``MSTOPK``, in each iteration.

    Args:
        values: flat, fp32 or fp64, on any device.
        density: the fraction of entries to select.
        selector: how to select; not ``AUTO``.
        generator: a generator on the CPU that draws the windows of ``MSTOPK``; the others ignore it.
        mstopk_iterations: steps of the binary search of ``MSTOPK``.

    Returns:
        Exactly ``selected_numel(values.numel(), density, selector)`` different indices, int64, ascending, on the device
        of ``values``.

    Raises:
        ValueError: as :func:`selected_numel` does, and for ``MSTOPK`` without a generator.

    Example:
        >>> select(torch.tensor([1.0, -3.0, 0.0, 2.0]), 0.5, Selector.EXACT)
        tensor([1, 3])
    """
    assert values.dim() == 1 and values.dtype in (torch.float32, torch.float64), (values.shape, values.dtype)
    if selector is Selector.MSTOPK and generator is None:
        raise ValueError("selector='mstopk' draws random windows: pass a generator, seeded once per rank")
    numel = values.numel()
    k = selected_numel(numel, density, selector)
    if k == 0 or k == numel:
        return torch.arange(k, device=values.device)
    match selector:
        case Selector.CHUNKED:
            return _largest_of_chunks(values, density)
        case Selector.MSTOPK:
            assert generator is not None
            return _mstopk(values, k, generator, mstopk_iterations)
        case _:
            return _largest(values, k)


def _rounded(numel: int, density: float) -> int:
    return max(round(density * numel), 1) if numel and density else 0


def _magnitude_bits(values: Tensor, mask: int = -1) -> Tensor:
    """The bits of ``|values|`` that are set in ``mask``, as int32 or int64."""
    integer = torch.int32 if values.dtype is torch.float32 else torch.int64
    return values.view(integer) & (torch.iinfo(integer).max & mask)


# --- EXACT


def _largest(values: Tensor, k: int) -> Tensor:
    bits = _magnitude_bits(values)
    if not values.is_cpu:
        return _pick(bits, k, bits.topk(k, sorted=False).values.amin())
    # A top-k of the whole slice takes several times as long on CPU as to count magnitudes by their upper bits, and then
    # to leave out all that are certainly too small.
    shift, bins = _BINS[values.dtype]
    counts = torch.bincount(bits >> shift, minlength=bins).flip(0).cumsum(0)  # entries in this bin or above it
    from_top = int(torch.searchsorted(counts, k))
    k_above = int(counts[from_top - 1]) if from_top else 0
    low = (bins - 1 - from_top) << shift
    places = (bits >= low).nonzero().view(-1)
    bits = bits[places]
    boundary_bin = bits if k_above == 0 else bits[bits < low + (1 << shift)]
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


# --- MSTOPK


class Bracket(NamedTuple):
    """Where the binary search of MSTopK ended: ``k1 = len(above) <= k <= k2 = len(above) + len(below)``.

    Attributes:
        above: indices of the magnitudes that reach the upper threshold.
        below: indices of those that only reach the lower one.
    """

    above: Tensor
    below: Tensor


def search_bracket(magnitudes: Tensor, k: int, iterations: int) -> Bracket | None:
    """Search for thresholds that slightly less and slightly more than ``k`` magnitudes reach; both lists ascend.

    None if fewer than ``k`` magnitudes reach the mean, below which the search does not look. Seldom do more than 40%;
    none do if there is a NaN, or if rounding puts the mean of equal ones above them.
    """
    highest, mean = float(magnitudes.max()), float(magnitudes.mean())
    # The paper counts over the whole slice each time. What is below the lower threshold will never count again.
    places = (magnitudes >= mean).nonzero().view(-1)
    if places.numel() < k:
        return None
    magnitudes = magnitudes[places]
    low, high = 0.0, 1.0
    upper_threshold = float("inf")  # stays if all are equal: then none are above
    for _ in range(iterations):
        middle = (low + high) / 2
        threshold = mean + middle * (highest - mean)
        reaching = magnitudes >= threshold
        count = int(reaching.count_nonzero())
        if count <= k:
            high, upper_threshold = middle, threshold
            if count == k:
                break  # no other threshold can be better
        else:
            low = middle
            if count < places.numel():
                kept = reaching.nonzero().view(-1)
                places, magnitudes = places[kept], magnitudes[kept]
    is_above = magnitudes >= upper_threshold
    return Bracket(places[is_above], places[~is_above])


def _mstopk(values: Tensor, k: int, generator: torch.Generator, iterations: int) -> Tensor:
    bracket = search_bracket(values.abs(), k, iterations)
    if bracket is None:
        return _largest(values, k)
    above, below = bracket
    missing = k - above.numel()
    begin = int(torch.randint(below.numel() - missing + 1, (), generator=generator))
    return torch.cat([above, below[begin : begin + missing]]).sort().values
