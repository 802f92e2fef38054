"""Measures the link before the first plan, with single legs and with bursts of legs."""

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
    """Time legs of different sizes while nothing else is on the link. All ranks must call it.

    Takes about as long as sending 80 MiB; less if the model has less than 16 MiB.

    Args:
        link: the link to measure; its ``meter`` does not change.
        model_bytes: bytes of all gradients, which limit the sizes of the probed legs.
        device: device of the gradients.

    Returns:
        The link model that this rank has measured.
    """
    if link.world_size == 1:
        return LinkModel(0.0, 0.0, 0.0)
    large_bytes = max(min(_LARGEST_BYTES, model_bytes // 4), 4 * _SMALL_BYTES)
    with link.meter.unrecorded():
        _time_legs(link, device, 1, _SMALL_BYTES)  # warm-up: connections, memory
        lone = [(_sent(link, size), _best_s(link, device, 1, size)) for size in (_SMALL_BYTES, large_bytes)]
        # Bursts use no tiny legs: a leg's host cost is hidden only if the link is busy for longer than that.
        bursts = [
            (_BURST_LEGS, _sent(link, size), _best_s(link, device, _BURST_LEGS, size))
            for size in (large_bytes // 4, large_bytes // 2)
        ]
    return LinkModel.fit(lone, bursts)


def _best_s(link: Link, device: torch.device, legs: int, buffer_bytes: int) -> float:
    """The shortest of several times, in seconds: disturbances only make a link slower."""
    return min(_time_legs(link, device, legs, buffer_bytes) for _ in range(_REPEATS))


def _sent(link: Link, buffer_bytes: int) -> int:
    return buffer_bytes * (link.world_size - 1) // link.world_size


def _time_legs(link: Link, device: torch.device, legs: int, buffer_bytes: int) -> float:
    """Seconds from the start of several scatter legs until the last is done, on a link that was busy just before.

    An idle link sends a first burst faster than it can send continuously, so one leg goes ahead untimed.
    """
    sizes = [max(buffer_bytes, _PRIMING_BYTES), *[buffer_bytes] * legs]
    buffers = [torch.zeros(size // 4 // link.world_size * link.world_size, device=device) for size in sizes]
    link.begin_iteration()
    link.all_gather_small(torch.zeros(1, device=device))  # a barrier, so that all ranks begin together
    scatters: list[ScatterLeg] = [link.reduce_scatter(0, buffers[0])]
    scatters[0].wait()
    _wait_for_device(device)
    start_s = time.perf_counter()
    scatters += [link.reduce_scatter(index, buffer) for index, buffer in enumerate(buffers[1:], start=1)]
    for scatter in scatters:
        scatter.wait()
    _wait_for_device(device)
    seconds = time.perf_counter() - start_s
    # Peers may still receive from the buffers, which are freed on return: finish both legs of each.
    for gather in [link.all_gather(scatter) for scatter in scatters]:
        gather.wait()
    _wait_for_device(device)
    return seconds


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
