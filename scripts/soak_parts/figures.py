"""What can grow in a process: memory, threads, descriptors, objects."""

import gc
import os
from pathlib import Path

import torch

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def of_process(pid: int) -> dict[str, float]:
    """Figures that the kernel knows of a process."""
    process = Path("/proc", str(pid))
    return {
        "rss_bytes": PAGE_BYTES * int((process / "statm").read_text().split()[1]),
        "threads": len(os.listdir(process / "task")),
        "descriptors": len(os.listdir(process / "fd")),
    }


def of_this_process() -> dict[str, float]:
    """The same of this process, and how many objects are alive once the garbage is gone."""
    gc.collect()
    objects = gc.get_objects()
    # type(), because isinstance asks an object for its class, and an object may do anything then.
    tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
    counts: dict[str, float] = {"objects": len(objects), "tensors": tensors}
    del objects
    return of_process(os.getpid()) | counts
