"""The resources of leases: a GPU, or a CPU core in place of a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_crossover.device import Stream

_GPU = "GPU-"


def default_resource() -> str:
    """The current CUDA device as ``GPU-<uuid>``, or the first core that this process may run on as ``cpu:<n>``."""
    from ddp_crossover import device as gpu  # import here: the broker loads this package without torch

    return f"{_GPU}{uuid}" if (uuid := gpu.uuid()) else f"cpu:{min(os.sched_getaffinity(0))}"


def is_gpu(resource: str) -> bool:
    """Whether ``resource`` is a GPU, on which work is queued and runs later."""
    return resource.startswith(_GPU)


def queued_work(resource: str, stream: Stream | None) -> Callable[[], bool] | None:
    """A function that tells whether the device has done all that is queued on ``stream`` now.

    None if that is certain: on a CPU resource, or in a process that has not used the GPU. An error of an earlier kernel
    is not raised, and ends the work: CUDA raises it again in the job's own next call.

    Args:
        resource: the resource of the lease.
        stream: None for the calling thread's current stream.
    """
    # A process that has not imported torch cannot have queued work.
    if not is_gpu(resource) or "torch" not in sys.modules:
        return None
    from ddp_crossover import device as gpu

    if not gpu.is_in_use():
        return None
    try:
        event = gpu.record(stream if stream is not None else gpu.current_stream())
    except RuntimeError:
        return None
    return lambda: gpu.has_happened(event, if_broken=True)
