"""Puts the wire into the package: everything that it sends goes over the wire, and its link says how many ranks there
are. The package itself is not changed, and everything else in it runs as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ddp_crossover import composition
from ddp_crossover.comm import all_reduce
from ddp_crossover.comm.link import Link
from ddp_crossover.nccl import nccl_link
from ddp_crossover.nccl.make_link import make_link
from gpu_bench_parts.cpu_wire import CpuLink, CpuWire
from gpu_bench_parts.wire import GpuWire


class _WiredDist:
    """`torch.distributed` with another all-reduce."""

    def __init__(self, all_reduce: Callable[..., Any]) -> None:
        self.all_reduce = all_reduce

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


@contextmanager
def emulated_wire(ranks: int, device: torch.device) -> Iterator[GpuWire | CpuWire]:
    """Let DDP models that are attached in this context, on a process group of one rank, send over a wire.

    Their legs must have ended when the context does.

    Args:
        ranks: how many ranks the wire's ring has.
        device: device of the models.

    Yields:
        The wire, infinitely fast at first.
    """
    wire = make_gpu_wire(ranks, device) if device.type == "cuda" else CpuWire(ranks)
    with plugged_in(wire):
        yield wire


def make_gpu_wire(ranks: int, device: torch.device) -> GpuWire:
    """A wire over the collectives that the package calls now."""
    return GpuWire(
        ranks,
        device,
        reduce_scatter=nccl_link._reduce_scatter,
        all_gather=nccl_link._all_gather,
        all_reduce=dist.all_reduce,
    )


@contextmanager
def plugged_in(wire: GpuWire | CpuWire) -> Iterator[None]:
    """Let the package send over this wire."""
    with ExitStack() as stack:

        def replace(module: ModuleType, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        if isinstance(wire, GpuWire):
            replace(nccl_link, "_reduce_scatter", wire.reduce_scatter)
            replace(nccl_link, "_all_gather", wire.all_gather)
            replace(nccl_link, "dist", _WiredDist(wire.all_reduce))
        replace(all_reduce, "dist", _WiredDist(wire.all_reduce))  # of plain DDP, timed or as the tuner tries it
        replace(composition, "make_link", _link_maker(wire, make_link))
        yield


def _link_maker(wire: GpuWire | CpuWire, make_link: Callable[..., Link]) -> Callable[..., Link]:
    def make(process_group: dist.ProcessGroup, device: torch.device, *args: Any, **options: Any) -> Link:
        if isinstance(wire, CpuWire):
            return CpuLink(process_group, wire)
        link = make_link(process_group, device, *args, **options)
        link.world_size = wire.ranks
        return link

    return make
