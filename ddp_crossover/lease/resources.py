"""What a lease is about: a GPU, or a core that stands in for one."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_GPU = "GPU-"


def default_resource() -> str:
    """The current CUDA device as ``GPU-<uuid>``, or the first core that this process may run on as ``cpu:<n>``."""
    import torch  # here, because the broker loads this package and needs no torch

    if torch.cuda.is_available():
        return f"{_GPU}{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return f"cpu:{min(os.sched_getaffinity(0))}"


def is_gpu(resource: str) -> bool:
    """Whether work is queued there, to be done later."""
    return resource.startswith(_GPU)


def drain(resource: str, stream: torch.cuda.Stream | None) -> None:
    """Wait until ``stream`` (None: the current one) has done all that was queued on it. Other threads run on.

    Protects the next holder: kernels still queued would run beside its own. An error of an earlier kernel is not
    raised here; CUDA raises it again in the job's own next call.
    """
    # Nothing has been queued by a process that has not even loaded torch.
    torch = sys.modules.get("torch")
    if torch is None or not is_gpu(resource) or not torch.cuda.is_initialized():
        return
    try:
        event = torch.cuda.Event(blocking=True)  # sleeps; spinning would take a core from the data loader
        event.record(stream)
        event.synchronize()  # without the GIL
    except RuntimeError:
        return
