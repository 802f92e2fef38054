"""The loops of codes, compiled by numba: one pass over the elements, without Python's lock. Arrays in, arrays out.

They have the bits of the operations of torch in ``block_int8.py`` and ``top_k.py``, which say what the numbers mean:
nothing is reordered that rounds, and no two operations are contracted. A loop is compiled when this file is imported,
for one type of each argument, so never in the middle of a step; numba keeps the result in a folder of the user.

Each loop over a block or a run has a length that the compiler knows, so that it becomes vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from ddp_crossover.addons.codes.block_int8 import BLOCK_NUMEL, LARGEST_CODE, LOWER_HALF, NAN_BITS, SMALLEST_SCALE

_int, _float = np.int32, np.float32  # numba computes in 64 bits what is not said to have 32
_INFINITE_BITS, _INFINITE_HALF = 0x7F800000, 0x7F80
_MAGNITUDE = 0x7FFFFFFF
_SMALLEST_SCALE_BITS = int(_float(SMALLEST_SCALE).view(_int))
# A chunk of 4096 has 128 runs: at a density of 1% few of them have large elements, and shorter ones take longer.
_RUN_NUMEL = 32


# Torch divides by zero without an error, too; a check would be in the way of vector instructions.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_inner: Callable[[Any], Any] = numba.njit(**_OPTIONS)  # compiled as a part of those that call it


def _compiled(*signatures: Any) -> Callable[[Any], Any]:
    """Compile for these types now, or take it from the cache."""

    def compile_it(function: Any) -> Any:
        try:
            return numba.njit(list(signatures), cache=True, **_OPTIONS)(function)
        except (RuntimeError, OSError):  # there is no folder that the user may write to, or no room in it
            return numba.njit(list(signatures), **_OPTIONS)(function)

    return compile_it


_floats, _bytes, _halves = types.float32[::1], types.int8[:, ::1], types.int16[::1]
_blocks = types.float32[:, ::1]


@_inner
def _bits(x: Any) -> Any:
    return np.float32(x).view(np.int32)


@_inner
def _of_bits(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


# --- Blocks of 64 as 8-bit integers; a scale is the upper half of the bits of a float.


@_inner
def _scale_bits(largest: Any) -> Any:
    """Bits of the scale of a block, whose largest magnitude has the bits ``largest``."""
    bits = min(_bits(_of_bits(largest) / _float(LARGEST_CODE)), _int(NAN_BITS))
    bits = _int((bits + _int(LOWER_HALF)) & ~_int(LOWER_HALF))
    return bits if bits >= _int(_SMALLEST_SCALE_BITS) else _int(0)


@_compiled(types.void(_blocks, _blocks, _blocks, _bytes, _halves))
def encode_int8(values: Any, residual: Any, left_out: Any, codes: Any, scales: Any) -> None:
    """Encode ``values + residual``; all but ``scales`` have the shape (blocks, 64)."""
    for block in range(len(scales)):
        largest = _int(0)
        for i in range(BLOCK_NUMEL):
            x = values[block, i] + residual[block, i]
            left_out[block, i] = x
            largest = max(largest, _int(_bits(x) & _int(_MAGNITUDE)))
        bits = _scale_bits(largest)
        scales[block] = np.int16(bits >> 16)
        if bits >= _int(_INFINITE_BITS):
            for i in range(BLOCK_NUMEL):
                codes[block, i] = 0
                left_out[block, i] = np.nan
            continue
        scale = _of_bits(bits)
        divisor = max(scale, _float(SMALLEST_SCALE))
        for i in range(BLOCK_NUMEL):
            x = left_out[block, i]
            rounded = np.rint(x / divisor)
            codes[block, i] = np.int8(rounded)
            left_out[block, i] = x - rounded * scale


@_compiled(types.void(_blocks, _blocks, _bytes, _halves))
def encode_sum_int8(total: Any, left_out: Any, codes: Any, scales: Any) -> None:
    """Encode ``total``, and replace it by what the code stands for."""
    for block in range(len(scales)):
        largest = _int(0)
        for i in range(BLOCK_NUMEL):
            largest = max(largest, _int(_bits(total[block, i]) & _int(_MAGNITUDE)))
        bits = _scale_bits(largest)
        scales[block] = np.int16(bits >> 16)
        if bits >= _int(_INFINITE_BITS):
            for i in range(BLOCK_NUMEL):
                codes[block, i] = 0
                left_out[block, i] = total[block, i] = np.nan
            continue
        scale = _of_bits(bits)
        divisor = max(scale, _float(SMALLEST_SCALE))
        for i in range(BLOCK_NUMEL):
            x = total[block, i]
            rounded = np.rint(x / divisor)
            code = np.int8(rounded)
            codes[block, i] = code
            left_out[block, i] = x - rounded * scale
            total[block, i] = _float(code) * scale  # not `rounded`, which may be -0.0


@_compiled(types.void(_bytes, _halves, _blocks))
def decode_int8(codes: Any, scales: Any, out: Any) -> None:
    """Set ``out`` to what the codes stand for."""
    for block in range(len(scales)):
        scale = _of_bits(_int(scales[block]) << 16)
        for i in range(BLOCK_NUMEL):
            out[block, i] = _float(codes[block, i]) * scale


@_compiled(types.void(_bytes, _halves, _blocks))
def add_int8(codes: Any, scales: Any, total: Any) -> None:
    """Add what the codes stand for to ``total``."""
    for block in range(len(scales)):
        scale = _of_bits(_int(scales[block]) << 16)
        for i in range(BLOCK_NUMEL):
            total[block, i] += _float(codes[block, i]) * scale


@_compiled(types.void(_halves, types.boolean[::1]))
def are_finite(scales: Any, answer: Any) -> None:
    """Set the one element of ``answer``."""
    others = _int(0)
    for block in range(len(scales)):
        others = _int(others + _int((scales[block] & _INFINITE_HALF) == _INFINITE_HALF))
    answer[0] = others == 0


# --- The largest elements. A key is the bits of a magnitude, without those that do not count.


@_inner
def _kth_largest(keys: Any, count: Any, k: Any, lowest_bit: Any) -> Any:
    """The largest key that ``k`` of the first ``count`` ones reach, bit by bit: each is one pass of vector compares."""
    kth = _int(0)
    for bit in range(30, lowest_bit - 1, -1):
        trial = _int(kth | (_int(1) << bit))
        reached = _int(0)
        for i in range(count):
            reached = _int(reached + _int(keys[i] >= trial))
        if reached >= k:
            kth = trial
    return kth


@_inner
def _add_and_find_largest(values: Any, residual: Any, rest: Any, mask: Any, largest_of_runs: Any) -> None:
    """Set ``rest`` to ``values + residual``, and note the largest key of each run of it."""
    runs = len(rest) // _RUN_NUMEL
    whole = runs * _RUN_NUMEL
    shape = (runs, _RUN_NUMEL)
    x, y, z = values[:whole].reshape(shape), residual[:whole].reshape(shape), rest[:whole].reshape(shape)
    for run in range(runs):
        largest = _int(0)
        for i in range(_RUN_NUMEL):
            z[run, i] = x[run, i] + y[run, i]
            largest = max(largest, _int(_bits(z[run, i]) & mask))
        largest_of_runs[run] = largest
    if whole < len(rest):
        largest = _int(0)
        for i in range(whole, len(rest)):
            rest[i] = values[i] + residual[i]
            largest = max(largest, _int(_bits(rest[i]) & mask))
        largest_of_runs[runs] = largest


_places = (_halves, types.int32[::1])
_three = (types.int64,) * 3


@_compiled(*(types.void(_floats, places, _floats, *_three) for places in _places))
def add_largest(sent: Any, places: Any, total: Any, chunk_numel: Any, of_each: Any, of_rest: Any) -> None:
    """Add what :func:`encode_largest` has sent to ``total``."""
    done = 0
    for low in range(0, len(total), chunk_numel):
        chunk = total[low : low + chunk_numel]
        for _ in range(of_each if len(chunk) == chunk_numel else of_rest):
            chunk[places[done]] += sent[done]
            done += 1


@_compiled(*(types.void(_floats, _floats, _floats, _floats, places, *_three, types.int64) for places in _places))
def encode_largest(
    values: Any,
    residual: Any,
    left_out: Any,
    sent: Any,
    places: Any,
    chunk_numel: Any,
    of_each: Any,
    of_rest: Any,
    lowest_bit: Any,
) -> None:
    """Send the largest elements of each chunk of ``values + residual``, by ascending places in the chunk.

    The ``k`` runs with the largest elements have ``k`` elements that reach the least of these. So whatever is below
    cannot be among the ``k`` largest, and few elements are left to be looked at one by one.

    Args:
        of_each, of_rest: how many of a whole chunk, and of the last one.
        lowest_bit: the lowest bit of magnitudes that counts.
    """
    numel = len(values)
    mask = _int(_int(_MAGNITUDE) >> lowest_bit << lowest_bit)
    most = min(chunk_numel, numel)
    # One more than there can be: what does not count is written behind those that do, without a branch.
    largest_of_runs = np.empty(most // _RUN_NUMEL + 1, np.int32)
    runs = np.empty(most // _RUN_NUMEL + 2, np.int32)
    keys, candidates = np.empty(most + 1, np.int32), np.empty(most + 1, np.int32)
    done = 0
    for low in range(0, numel, chunk_numel):
        rest = left_out[low : low + chunk_numel]
        size = len(rest)
        k = of_each if size == chunk_numel else of_rest
        _add_and_find_largest(values[low : low + size], residual[low : low + size], rest, mask, largest_of_runs)
        run_count = (size + _RUN_NUMEL - 1) // _RUN_NUMEL
        least = _kth_largest(largest_of_runs, run_count, k, lowest_bit) if k <= run_count else _int(0)
        found_runs = 0
        for run in range(run_count):
            runs[found_runs] = run
            found_runs += int(largest_of_runs[run] >= least)
        found = 0
        for number in range(found_runs):
            start = runs[number] * _RUN_NUMEL
            for place in range(start, min(start + _RUN_NUMEL, size)):
                key = _int(_bits(rest[place]) & mask)
                keys[found], candidates[found] = key, place
                found += int(key >= least)
        kth = _kth_largest(keys, found, k, lowest_bit)
        equal = k
        for i in range(found):
            equal -= keys[i] > kth
        for i in range(found):
            is_equal = keys[i] == kth
            if keys[i] > kth or (is_equal and equal > 0):  # of equal ones the first
                equal -= is_equal
                sent[done], places[done] = rest[candidates[i]], candidates[i]
                rest[candidates[i]] = 0.0
                done += 1
