"""Measures the link before the first plan, with single legs and with bursts of legs."""

from __future__ import annotations

import torch

from ddp_crossover import device as gpu
from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.leg import ScatterLeg
from ddp_crossover.comm.link import Link
from ddp_crossover.plan.compute_profiler import Stopwatch
from ddp_crossover.plan.cost_model import LinkModel

_SMALL_BYTES = 16 * 2**10
_LARGEST_BYTES = 4 * 2**20
_MOST_PRIMING_BYTES = 2**20
# On a GPU, where links are faster and launching takes longer: these times as many bytes.
_GPU_SCALE = 8
_REPEATS = 3
_BURST_LEGS = 8


def probe_link(link: Link, model_bytes: int, device: torch.device) -> LinkModel:
    """Time legs of different sizes while nothing else is on the link. All ranks must call it.

    Takes about as long as sending 80 MiB, on a GPU 640 MiB; less if the model has less than 16 MiB (128 on a GPU).

    Args:
        link: the link to measure; its ``meter`` does not change.
        model_bytes: bytes of all gradients, which limit the sizes of the probed legs.
        device: device of the gradients.

    Returns:
        The link model that this rank has measured.
    """
    if link.world_size == 1:
        return LinkModel(0.0, 0.0, 0.0)
    scale = _GPU_SCALE if gpu.has_streams(device) else 1
    large_bytes = max(min(scale * _LARGEST_BYTES, model_bytes // 4), 4 * _SMALL_BYTES)
    priming_bytes = min(scale * _MOST_PRIMING_BYTES, max(large_bytes, model_bytes))

    def best_s(legs: int, buffer_bytes: int) -> float:
        """The shortest of several times: disturbances only make a link slower."""
        return min(_time_legs(link, device, legs, buffer_bytes, priming_bytes) for _ in range(_REPEATS))

    with link.meter.unrecorded():
        _time_legs(link, device, 1, _SMALL_BYTES, priming_bytes)  # warm-up: connections, memory
        lone = [(_sent(link, size), best_s(1, size)) for size in (_SMALL_BYTES, large_bytes)]
        # Bursts use no tiny legs: a leg's host cost is hidden only if the link is busy for longer than that.
        bursts = [
            (_BURST_LEGS, _sent(link, size), best_s(_BURST_LEGS, size)) for size in (large_bytes // 4, large_bytes // 2)
        ]
    return LinkModel.fit(lone, bursts)


def _sent(link: Link, buffer_bytes: int) -> int:
    return buffer_bytes * (link.world_size - 1) // link.world_size


def _time_legs(link: Link, device: torch.device, legs: int, buffer_bytes: int, priming_bytes: int) -> float:
    """Seconds from the start of several scatter legs until the last is done, on a link that was busy just before.

    An idle one sends a first burst faster than it can go on. So a leg of ``priming_bytes`` goes ahead, untimed, or of
    ``buffer_bytes`` where these are more.
    """
    sizes = [max(buffer_bytes, priming_bytes), *[buffer_bytes] * legs]
    numels = [size // 4 // link.world_size * link.world_size for size in sizes]
    buffers = [FusionBuffer((torch.zeros(numel, device=device),)) for numel in numels]
    link.begin_iteration()
    link.all_gather_small(torch.zeros(1, device=device))  # a barrier, so that all ranks begin together
    scatters: list[ScatterLeg] = [link.reduce_scatter(0, buffers[0])]
    scatters[0].wait()
    # On a GPU the host is already here while the first leg is under way, so what it takes to launch the others is
    # hidden, as it is in training.
    stopwatch = Stopwatch(device)
    begin = stopwatch.mark()
    scatters += [link.reduce_scatter(index, buffer) for index, buffer in enumerate(buffers[1:], start=1)]
    for scatter in scatters:
        scatter.wait()
    _, seconds = stopwatch.seconds([begin, stopwatch.mark()], waits=True)
    # Peers may still receive from the buffers, which are freed on return: finish both legs of each.
    for gather in [link.all_gather(scatter) for scatter in scatters]:
        gather.wait()
    gpu.synchronize(device)
    return seconds
