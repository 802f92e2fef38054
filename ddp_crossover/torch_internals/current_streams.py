"""Which CUDA streams are current: quickly, for all threads, and with notice of each change.

``torch.cuda.set_stream`` is replaced, through which ``torch.cuda.stream`` goes, too (torch 2.11 to 2.15). Not seen:
``with torch.Stream():``, and what C++ does.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from ddp_crossover.torch_internals.private import private

Stream: TypeAlias = "torch.cuda.Stream"


class Watcher(Protocol):
    """Told of changes."""

    def switched_to(self, stream: Stream) -> None:
        """Called in the thread whose current stream has become ``stream``."""


class _ThreadStreams(dict[torch.device, Stream]):
    """The stream of each device that one thread has switched to last. It ends with the thread."""


_One = TypeVar("_One")


class _Alive(Generic[_One]):
    """Objects, as long as they live. Safe to walk through while other threads add some, which a WeakSet is not."""

    def __init__(self) -> None:
        self._of_id: dict[int, weakref.ref[_One]] = {}

    def add(self, one: _One) -> None:
        key = id(one)
        self._of_id[key] = weakref.ref(one, lambda _: self._of_id.pop(key, None))

    def all(self) -> list[_One]:
        # One call of C makes the copy: no other thread runs meanwhile.
        return [one for reference in list(self._of_id.values()) if (one := reference()) is not None]


class CurrentStreams:
    """The current streams of all threads that have ever switched, as far as torch's Python functions switch them.

    Args:
        set_stream: torch's function.
    """

    def __init__(self, set_stream: Any) -> None:
        self.set_unnoticed = set_stream
        self._watchers: _Alive[Watcher] = _Alive()
        self._places: _Alive[_ThreadStreams] = _Alive()
        self._of_thread = threading.local()

    def watch(self, watcher: Watcher) -> None:
        """Tell ``watcher`` of changes for as long as it lives."""
        self._watchers.add(watcher)

    def switch(self, stream: Stream | None) -> None:
        """Do what torch's function does, and tell the watchers."""
        self.set_unnoticed(stream)
        if stream is not None:
            self.note(stream)

    def note(self, stream: Stream) -> None:
        """Note that ``stream`` is the current one of this thread and its device from now on."""
        place = getattr(self._of_thread, "place", None)
        if place is None:
            place = _ThreadStreams()
            vars(self._of_thread)["place"] = place
            self._places.add(place)
        place[stream.device] = stream
        for watcher in self._watchers.all():
            watcher.switched_to(stream)

    def of_threads(self, device: torch.device) -> set[Stream]:
        """The stream of this device that each thread has switched to last."""
        return {stream for place in self._places.all() if (stream := place.get(device)) is not None}


# Torch makes an object at each call, in 5 us, and a step asks once for each parameter. By id, device, and type.
_known: dict[tuple[int, int, int], Stream] = {}


def find_current_stream(device: torch.device | None) -> Stream:
    """What ``torch.cuda.current_stream`` returns: the calling thread's current stream on ``device``, or on its own.

    Without the private function that it uses (seen in torch 2.11 to 2.15), this calls torch's.
    """
    identify = getattr(torch._C, "_cuda_getCurrentStream", None)
    if identify is None or device is None or device.index is None or not torch.cuda.is_initialized():
        return torch.cuda.current_stream(device)
    key = identify(device.index)
    if (known := _known.get(key)) is None:
        known = _known[key] = torch.cuda.current_stream(device)
    return known


@functools.cache
def find_default_stream(device: torch.device) -> Stream:
    """What ``torch.cuda.default_stream`` returns."""
    return torch.cuda.default_stream(device)


@functools.cache
def current_streams() -> CurrentStreams:
    """Those of this process; from the first call on, they are followed."""
    found = CurrentStreams(private(torch.cuda, "set_stream"))

    @functools.wraps(found.set_unnoticed)
    def set_stream(stream: Stream | None) -> None:
        found.switch(stream)

    torch.cuda.set_stream = set_stream
    return found
