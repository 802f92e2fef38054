"""The part `spin`: how much slower matrix products become beside a process whose kernel only waits.

A collective of NCCL waits for its peers inside of a kernel. To the GPU that is work: without MPS, processes get time
slices in turn, so the question is what a neighbour can compute meanwhile.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from bench_kit.device_time import Sleeper, between_s, now, synchronize, wait_for
from bench_kit.rounds import spread
from gpu_check_parts import mps
from gpu_check_parts.case import Case, two_ranks_over_gloo
from gpu_check_parts.runner import Runner

ROUNDS = 3
PHASE_S = 1.0
# The neighbour begins before the measurement and ends after it.
MARGIN_S = 0.3
SLEEP_S = 0.02
UNDER_WAY = 3
ALONE = "alone"
NEIGHBOURS = (ALONE, "a sleeping kernel", "matrix products")


def run(runner: Runner) -> None:
    """One case without MPS, one with it."""
    launch = two_ranks_over_gloo(runner.device)
    mps.run_with_and_without(
        runner, lambda which: [Case("spin", f"matrix products beside a neighbour, {which}", spin, (), launch, True)]
    )


def spin(device: torch.device) -> Iterator[dict[str, Any]]:
    """Rank 0 is the neighbour, rank 1 multiplies and times itself."""
    is_neighbour = dist.get_rank() == 0
    product_s: dict[str, list[float]] = {name: [] for name in NEIGHBOURS}
    stretched: list[float] = []
    work = Products(device)
    sleeper = Sleeper(device)
    for _ in range(ROUNDS):
        for neighbour in NEIGHBOURS:
            synchronize(device)
            dist.barrier()
            if is_neighbour:
                stretched += _occupy(device, neighbour, work, sleeper)
            else:
                time.sleep(MARGIN_S)
                product_s[neighbour].append(work.time_each_s(PHASE_S))
            dist.barrier()
        yield _neighbour_figures(stretched) if is_neighbour else _figures(product_s)


def _figures(product_s: dict[str, list[float]]) -> dict[str, Any]:
    alone_s = product_s[ALONE]
    slower = {
        name: spread([beside / alone for beside, alone in zip(times_s, alone_s, strict=True)])
        for name, times_s in product_s.items()
        if name != ALONE
    }
    noticed = "; ".join(f"{ratio['median']:.2f} times as slow beside {name}" for name, ratio in slower.items())
    return {"product_s": product_s, "slower": slower, "noticed": noticed}


def _neighbour_figures(stretched: list[float]) -> dict[str, Any]:
    if not stretched:
        return {"noticed": "no sleeping kernel was timed"}
    longer = spread(stretched)
    return {"sleep_longer": longer, "noticed": f"the sleeping kernel took {longer['median']:.2f} times what it should"}


def _occupy(device: torch.device, neighbour: str, work: "Products", sleeper: Sleeper) -> list[float]:
    """Be the neighbour while the other rank measures; returns by how much sleeps were longer than asked for."""
    ends_s = time.monotonic() + PHASE_S + 2 * MARGIN_S
    if neighbour == ALONE:
        time.sleep(PHASE_S + 2 * MARGIN_S)
        return []
    if neighbour == "matrix products":
        work.time_each_s(PHASE_S + 2 * MARGIN_S)
        return []
    return _sleep_until(device, ends_s, sleeper)


def _sleep_until(device: torch.device, ends_s: float, sleeper: Sleeper) -> list[float]:
    """Always some sleeps on a side stream, as legs are, each on its way before the last one ends."""
    marks: deque[tuple[Any, Any]] = deque()
    ratios = []
    side = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()
    with side:
        while time.monotonic() < ends_s:
            begin = now(device)
            sleeper.sleep(SLEEP_S)
            marks.append((begin, now(device)))
            if len(marks) > UNDER_WAY:
                ratios.append(between_s(*marks.popleft()) / SLEEP_S)
    synchronize(device)
    return ratios


class Products:
    """Matrix products, one after the other: compute that fills a GPU.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        size, dtype = (4096, torch.bfloat16) if is_cuda else (192, torch.float32)
        self._left, self._right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        self._per_batch = 20 if is_cuda else 10
        for _ in range(3):
            self.batch()
        synchronize(device)

    def batch(self) -> None:
        """Enqueue some products, on an H100 some 5 ms."""
        for _ in range(self._per_batch):
            torch.mm(self._left, self._right)

    def time_each_s(self, seconds: float) -> float:
        """Multiply for so long; returns the seconds that each product took. The host is two batches ahead."""
        batches, marks, start_s = 0, deque[Any](), time.monotonic()
        while time.monotonic() - start_s < seconds:
            self.batch()
            batches += 1
            marks.append(now(self._device))
            if len(marks) > 2:
                wait_for(marks.popleft())
        synchronize(self._device)
        return (time.monotonic() - start_s) / (batches * self._per_batch)
