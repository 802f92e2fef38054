"""Measures what codes cost a rank, before the first plan."""

from __future__ import annotations

import time

import torch

from ddp_crossover.codecs.codec import Codec
from ddp_crossover.codecs.wire import Wire

_NUMEL = 2**20
_REPEATS = 3


def probe_codecs(wire: Wire) -> float:
    """Seconds by which codes delay a leg, per element of its fusion buffer: the mean of the two legs.

    Every element is encoded once and decoded once on the way to all ranks, with time for the sum in between.
    """
    codecs = [codec for codec in (wire.scatter, wire.gather) if codec is not None]
    return sum(map(_seconds, codecs)) / 2 / _NUMEL


def _seconds(codec: Codec) -> float:
    # Not all alike, or they would be found too easily.
    values = torch.linspace(-1.0, 1.0, _NUMEL) ** 3
    residual, left_out, out = values * 0.1, torch.empty_like(values), torch.zeros_like(values)
    payload = torch.empty(codec.payload_bytes(_NUMEL), dtype=torch.uint8)
    times_s = []
    for _ in range(_REPEATS):
        begin_s = time.perf_counter()
        codec.encode(values, residual, left_out, payload)
        codec.add(payload, out)
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s)
