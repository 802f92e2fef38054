"""The one seam in front of ``torch.cuda``: streams, events, and memory that streams use.

Everything else in the package takes them from here, and tests put a device with a virtual clock in its place. Call the
functions through the module (``from ddp_crossover import device as gpu``), so that they can be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ddp_crossover.torch_internals.current_streams import (
    Watcher,
    current_streams,
    find_current_stream,
    find_default_stream,
)

# Strings: a build for another device may lack the classes.
Stream: TypeAlias = "torch.cuda.Stream"
Event: TypeAlias = "torch.cuda.Event"
MemoryPool: TypeAlias = "torch.cuda.MemPool"


def has_streams(device: torch.device) -> bool:
    """Whether work for ``device`` is queued on streams and runs later. A ROCm build calls its GPUs cuda, too."""
    return device.type == "cuda"


def new_stream(device: torch.device, *, urgent: bool = False) -> Stream:
    """A new stream; the kernels of an ``urgent`` one go first where the device has to choose."""
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)


def current_stream(device: torch.device | None = None) -> Stream:
    """The calling thread's current stream on ``device``, or on the thread's current device."""
    return find_current_stream(device)


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Context manager in which ``stream`` and its device are the current ones; does nothing for None.

    It is not noticed by watchers of :func:`watch_switches`.
    """
    if stream is None:
        yield
        return
    switch = current_streams().set_unnoticed
    # Outside, a thread that has used no device yet would come back to device 0, and make a context there.
    with torch.cuda.device(stream.device):
        before = current_stream(stream.device)
        switch(stream)
        try:
            yield
        finally:
            switch(before)


def watch_switches(watcher: Watcher) -> None:
    """Tell ``watcher`` of each stream that a script makes the current one, for as long as the watcher lives."""
    current_streams().watch(watcher)


def streams_of_threads(device: torch.device) -> set[Stream]:
    """The streams of ``device`` on which any thread may be about to queue work."""
    return current_streams().of_threads(device) | {find_default_stream(device)}


def record(stream: Stream, *, timed: bool = False, awaited: bool = False) -> Event:
    """A new event that happens when ``stream`` has done everything queued on it so far.

    Args:
        stream: the stream.
        timed: whether :func:`seconds_between` is going to be asked about it. Other events cost less.
        awaited: whether a thread is going to :func:`sleep_until` it. In others it would spin on a core.
    """
    event = torch.cuda.Event(enable_timing=timed, blocking=awaited)
    event.record(stream)
    return event


def has_happened(event: Event, *, if_broken: bool) -> bool:
    """Whether ``event`` has happened; ``if_broken`` after an error of a kernel, which CUDA raises in training, too."""
    try:
        return bool(event.query())
    except RuntimeError:
        return if_broken


def is_idle(stream: Stream) -> bool:
    """Whether ``stream`` has done everything queued on it; False after an error of a kernel."""
    try:
        return bool(stream.query())
    except RuntimeError:
        return False


def sleep_until(event: Event) -> None:
    """Block the host until ``event`` has happened, without the GIL.

    Only for threads that have nothing else to do: nothing in a training step may wait for the device.
    """
    event.synchronize()


def seconds_between(begin: Event, end: Event) -> float:
    """Seconds of device time between two timed events, both of which have happened."""
    return float(begin.elapsed_time(end)) * 1e-3


def synchronize(device: torch.device) -> None:
    """Block the host until ``device`` has done everything; does nothing on a device without streams."""
    if has_streams(device):
        torch.cuda.synchronize(device)


def keep(memory: Tensor, stream: Stream) -> None:
    """Let the allocator keep ``memory`` until ``stream`` has done what is queued now, even if it is dropped before."""
    memory.record_stream(stream)


def new_memory_pool(allocator: Any, device: torch.device) -> MemoryPool:
    """A pool of memory on ``device`` that ``allocator`` makes, and that nothing else is allocated in."""
    with torch.cuda.device(device):
        return torch.cuda.MemPool(allocator)


def in_memory_pool(pool: MemoryPool, device: torch.device) -> AbstractContextManager[None]:
    """Context manager in which this thread's memory on ``device`` comes from ``pool``."""
    return torch.cuda.use_mem_pool(pool, device)


def future_on(device: torch.device) -> torch.futures.Future[Tensor]:
    """A future whose result is written by the stream that is current when it is set; who waits for it waits there."""
    return torch.futures.Future(devices=[device])


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is recorded into a CUDA graph."""
    return has_streams(device) and bool(torch.cuda.is_current_stream_capturing())


def is_recorded(stream: Stream) -> bool:
    """Whether any thread records ``stream`` into a CUDA graph."""
    with on_stream(stream):
        return is_capturing(stream.device)


def is_in_use() -> bool:
    """Whether this process has used a GPU."""
    return bool(torch.cuda.is_initialized())


def uuid(device: torch.device | None = None) -> str:
    """The UUID of ``device``, by default of the current GPU; empty without one."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device).uuid)


def unreachable_peers(device: torch.device) -> list[str]:
    """The UUIDs of the GPUs that this process sees and whose memory ``device`` cannot access."""
    peers = [torch.device("cuda", index) for index in range(torch.cuda.device_count()) if index != device.index]
    return [uuid(peer) for peer in peers if not torch.cuda.can_device_access_peer(device, peer)]


def nccl_version() -> tuple[int, ...]:
    """The version of NCCL that this process has loaded."""
    return tuple(torch.cuda.nccl.version())
