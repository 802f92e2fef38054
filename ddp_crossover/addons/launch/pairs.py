"""Measures the link between each two ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from ddp_crossover import device as gpu

_ROUND_TRIPS = 20
_FIRST_BYTES, _MOST_BYTES = 2**18, 2**24
_LONG_ENOUGH_S = 0.1
_MOST_RANKS = 16


@dataclass(frozen=True)
class MeasuredPair:
    """The link from one rank to another.

    Attributes:
        ranks: the two ranks.
        latency_s: half of a round trip of one byte.
        bytes_per_s: speed in one direction.
    """

    ranks: tuple[int, int]
    latency_s: float
    bytes_per_s: float


def measure_pairs(device: torch.device) -> list[MeasuredPair]:
    """Measure the pairs one after the other; every rank must call it, and the lower rank of each pair returns it.

    Beyond 16 ranks, each is measured with the next one only.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pairs = list(combinations(range(world_size), 2))
    if world_size > _MOST_RANKS:
        pairs = [(one, one + 1) for one in range(world_size - 1)]
    measured = []
    for pair in pairs:
        if rank in pair:
            latency_s, bytes_per_s = _measure(rank == pair[0], sum(pair) - rank, device)
            if rank == pair[0]:
                measured.append(MeasuredPair(pair, latency_s, bytes_per_s))
        dist.barrier()
    return measured


def _measure(leads: bool, peer: int, device: torch.device) -> tuple[float, float]:
    small = torch.zeros(1, dtype=torch.uint8, device=device)
    _round_trip_s(leads, peer, small)  # connects
    latency_s = median(_round_trip_s(leads, peer, small) for _ in range(_ROUND_TRIPS)) / 2
    size = _FIRST_BYTES
    while True:
        sent_s = _sending_s(leads, peer, torch.zeros(size, dtype=torch.uint8, device=device), small)
        if size >= _MOST_BYTES or sent_s > _LONG_ENOUGH_S:
            return latency_s, size / max(sent_s - latency_s, 1e-9)
        size *= 4


def _round_trip_s(leads: bool, peer: int, message: torch.Tensor) -> float:
    start_s = time.perf_counter()
    for sends in (leads, not leads):
        dist.send(message, peer) if sends else dist.recv(message, peer)
    gpu.synchronize(message.device)
    return time.perf_counter() - start_s


def _sending_s(leads: bool, peer: int, message: torch.Tensor, answer: torch.Tensor) -> float:
    """Seconds from sending until the answer; the same on both ranks, so that both go on alike."""
    start_s = time.perf_counter()
    if leads:
        dist.send(message, peer)
        dist.recv(answer, peer)
    else:
        dist.recv(message, peer)
        dist.send(answer, peer)
    gpu.synchronize(message.device)
    took_s = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64, device=message.device)
    dist.send(took_s, peer) if leads else dist.recv(took_s, peer)
    return float(took_s)
