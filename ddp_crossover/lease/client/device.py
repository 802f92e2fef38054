"""The resources of leases: a GPU, or a CPU core in place of a GPU."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_GPU = "GPU-"


def default_resource() -> str:
    """The current CUDA device as ``GPU-<uuid>``, or the first core that this process may run on as ``cpu:<n>``."""
    import torch  # import here: the broker loads this package without torch

    if torch.cuda.is_available():
        return f"{_GPU}{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return f"cpu:{min(os.sched_getaffinity(0))}"


def is_gpu(resource: str) -> bool:
    """Whether ``resource`` is a GPU, on which work is queued and runs later."""
    return resource.startswith(_GPU)


def drain(resource: str, stream: torch.cuda.Stream | None) -> None:
    """Wait, without the GIL, for all work queued on ``stream`` (None: the current CUDA stream).

    Otherwise kernels that are still queued would run concurrently with those of the next holder. An error of an earlier
    kernel is not raised here: CUDA raises it again in the job's own next call. Does nothing on a CPU resource.
    """
    # A process that has not imported torch cannot have queued work.
    torch = sys.modules.get("torch")
    if torch is None or not is_gpu(resource) or not torch.cuda.is_initialized():
        return
    try:
        event = torch.cuda.Event(blocking=True)  # sleeps: spinning would occupy a core of the data loader
        event.record(stream)
        event.synchronize()  # releases the GIL
    except RuntimeError:
        return
