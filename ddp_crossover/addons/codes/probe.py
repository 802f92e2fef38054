"""Measures what codes cost a rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ddp_crossover import device as gpu
from ddp_crossover.addons.codes.codec import Codec

_NUMEL = 2**20
_CODEC_REPEATS = 3


def seconds_per_element(codec: Codec, device: torch.device) -> float:
    """Seconds in which an element is encoded once and decoded once on ``device``."""
    # Not all alike, or they would be found too easily.
    values = torch.linspace(-1.0, 1.0, _NUMEL, device=device) ** 3
    residual, left_out, out = values * 0.1, torch.empty_like(values), torch.zeros_like(values)
    payload = torch.empty(codec.payload_bytes(_NUMEL), dtype=torch.uint8, device=device)

    def job() -> None:
        codec.encode(values, residual, left_out, payload)
        codec.add(payload, out)

    return (_on_device(job, values) if gpu.has_streams(device) else _on_host(job)) / _NUMEL


def _on_host(job: Callable[[], None]) -> float:
    times_s = []
    for _ in range(_CODEC_REPEATS):
        begin_s = time.perf_counter()
        job()
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s)


def _on_device(job: Callable[[], None], made: Tensor) -> float:
    """The mean, between two events: the host enqueues the next one while the device is at the last."""
    stream = gpu.current_stream(made.device)
    job()
    begin = gpu.record(stream, timed=True)
    for _ in range(_CODEC_REPEATS):
        job()
    end = gpu.record(stream, timed=True)
    gpu.synchronize(made.device)
    return gpu.seconds_between(begin, end) / _CODEC_REPEATS
