"""Measures the link before the first plan: a few legs by themselves, and bursts of legs."""

from __future__ import annotations

import time

import torch

from ddp_crossover.collectives.leg import ScatterLeg
from ddp_crossover.collectives.link import Link
from ddp_crossover.planning.cost_model import LinkModel

_SMALL_BYTES = 16 * 2**10
_LARGEST_BYTES = 4 * 2**20
_PRIMING_BYTES = 2**20
_REPEATS = 3
_BURST_LEGS = 8


def probe_link(link: Link, model_bytes: int, device: torch.device) -> LinkModel:
    """Time legs of different sizes while nothing else is on the link. Every rank must call it.

    Takes about as long as to send 80 MiB, less where the model has less than 16.

    Args:
        link: the link; its figures are left as they were.
        model_bytes: bytes of all gradients: larger legs than the model has are not worth a look.
        device: where the gradients are.

    Returns:
        What this rank has measured.
    """
    if link.world_size == 1:
        return LinkModel(0.0, 0.0, 0.0)
    large_bytes = max(min(_LARGEST_BYTES, model_bytes // 4), 4 * _SMALL_BYTES)
    with link.unrecorded():
        _time_legs(link, device, 1, _SMALL_BYTES)  # connections, memory
        lone = [(_sent(link, size), _best_s(link, device, 1, size)) for size in (_SMALL_BYTES, large_bytes)]
        # No tiny legs in bursts: what a leg costs the host is hidden where the link is busy for longer than that.
        bursts = [
            (_BURST_LEGS, _sent(link, size), _best_s(link, device, _BURST_LEGS, size))
            for size in (large_bytes // 4, large_bytes // 2)
        ]
    return LinkModel.fit(lone, bursts)


def _best_s(link: Link, device: torch.device, legs: int, buffer_bytes: int) -> float:
    """The shortest of several times: whatever disturbs a link makes it slower."""
    return min(_time_legs(link, device, legs, buffer_bytes) for _ in range(_REPEATS))


def _sent(link: Link, buffer_bytes: int) -> int:
    return buffer_bytes * (link.world_size - 1) // link.world_size


def _time_legs(link: Link, device: torch.device, legs: int, buffer_bytes: int) -> float:
    """Seconds from the first of several scatter legs until the last is done, on a link that was busy until then.

    A link that was idle lets a burst through that no long run gets.
    """
    sizes = [max(buffer_bytes, _PRIMING_BYTES), *[buffer_bytes] * legs]
    buffers = [torch.zeros(size // 4 // link.world_size * link.world_size, device=device) for size in sizes]
    link.next_iteration()
    link.all_gather_small(torch.zeros(1, device=device))  # all begin together
    scatters: list[ScatterLeg] = [link.reduce_scatter(0, buffers[0])]
    scatters[0].wait()
    _wait_for_device(device)
    start_s = time.perf_counter()
    scatters += [link.reduce_scatter(index, buffer) for index, buffer in enumerate(buffers[1:], start=1)]
    for scatter in scatters:
        scatter.wait()
    _wait_for_device(device)
    seconds = time.perf_counter() - start_s
    # Protects the buffers, which are dropped here, from peers that still receive from them.
    for gather in [link.all_gather(scatter) for scatter in scatters]:
        gather.wait()
    _wait_for_device(device)
    return seconds


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
