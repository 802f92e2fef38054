"""Which CUDA streams threads have made their current ones, and notice of each change.

``torch.cuda.set_stream`` is replaced, through which ``torch.cuda.stream`` goes, too (torch 2.11 to 2.15). Not seen:
``with torch.Stream():``, and what C++ does.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Protocol, TypeAlias

import torch

from ddp_crossover.torch_internals.private import private

Stream: TypeAlias = "torch.cuda.Stream"


class Watcher(Protocol):
    """Told of changes."""

    def switched_to(self, stream: Stream) -> None:
        """Called in the thread whose current stream has become ``stream``."""


class _Place:
    """The stream that one thread has switched to last. It ends with the thread."""

    def __init__(self) -> None:
        self.stream: Stream | None = None

    def move(self, stream: Stream) -> None:
        self.stream = stream


class CurrentStreams:
    """The current streams of all threads that have ever switched, as far as torch's Python functions switch them.

    Args:
        set_stream: torch's function.
    """

    def __init__(self, set_stream: Any) -> None:
        self.set_unnoticed = set_stream
        self._watchers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._of_thread = threading.local()
        self._places: weakref.WeakSet[_Place] = weakref.WeakSet()

    def watch(self, watcher: Watcher) -> None:
        """Tell ``watcher`` of changes for as long as it lives."""
        self._watchers.add(watcher)

    def switch(self, stream: Stream | None) -> None:
        """Do what torch's function does, and tell the watchers."""
        self.set_unnoticed(stream)
        if stream is not None:
            self.note(stream)

    def note(self, stream: Stream) -> None:
        """Note that ``stream`` is the current one of this thread from now on."""
        place = getattr(self._of_thread, "place", None)
        if place is None:
            place = _Place()
            vars(self._of_thread)["place"] = place
            self._places.add(place)
        place.move(stream)
        for watcher in list(self._watchers):
            watcher.switched_to(stream)

    def of_threads(self) -> set[Stream]:
        """The stream that each thread has switched to last."""
        return {place.stream for place in list(self._places) if place.stream is not None}


@functools.cache
def current_streams() -> CurrentStreams:
    """Those of this process; from the first call on, they are followed."""
    found = CurrentStreams(private(torch.cuda, "set_stream"))

    @functools.wraps(found.set_unnoticed)
    def set_stream(stream: Stream | None) -> None:
        found.switch(stream)

    torch.cuda.set_stream = set_stream
    return found
