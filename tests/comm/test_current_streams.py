"""What is known of the streams that a script's threads are on."""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ddp_crossover.torch_internals import current_streams as current_streams_module
from ddp_crossover.torch_internals.current_streams import CurrentStreams, find_current_stream


class Watcher:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def switched_to(self, stream: Any) -> None:
        self.seen.append(stream)


def test_the_context_of_torch_goes_through_the_function_that_is_replaced() -> None:
    device = torch.device("cuda:0")
    before, other = SimpleNamespace(device=device), SimpleNamespace(device=device)
    context = torch.cuda.StreamContext(other)  # type: ignore[arg-type]
    context.idx = 0  # as on a machine with a GPU
    with (
        mock.patch.object(torch.cuda, "current_stream", lambda device: before),
        mock.patch.object(torch.cuda, "set_stream") as set_stream,
        context,
    ):
        set_stream.assert_called_once_with(other)
    assert set_stream.call_args.args == (before,)


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def _stream(device: str = "cuda:0") -> Any:
    return Hashable(device=torch.device(device))


def test_threads_and_watchers_are_forgotten_when_they_end() -> None:
    streams = CurrentStreams(lambda stream: None)
    watcher, gone = Watcher(), Watcher()
    for each in (watcher, gone):
        streams.watch(each)
    seen = gone.seen
    mains, anothers = _stream(), _stream()
    streams.switch(mains)
    del gone, each
    gc.collect()
    thread = threading.Thread(target=streams.switch, args=(anothers,))
    thread.start()
    thread.join()
    streams.switch(None)  # does nothing, as torch says
    assert (watcher.seen, seen) == ([mains, anothers], [mains])
    gc.collect()
    assert streams.of_threads(mains.device) == {mains}


def test_a_thread_has_a_stream_of_each_device() -> None:
    streams = CurrentStreams(lambda stream: None)
    first, second = _stream("cuda:0"), _stream("cuda:1")
    streams.switch(first)
    streams.switch(second)
    assert [streams.of_threads(each.device) for each in (first, second)] == [{first}, {second}]


def test_threads_may_come_and_go_while_streams_are_listed() -> None:
    streams = CurrentStreams(lambda stream: None)
    stream, stop = _stream(), threading.Event()

    def churn() -> None:
        while not stop.is_set():
            thread = threading.Thread(target=streams.switch, args=(stream,))
            thread.start()
            thread.join()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    churning = [threading.Thread(target=churn) for _ in range(2)]
    try:
        for each in churning:
            each.start()
        ends_s = time.monotonic() + 1.0
        while time.monotonic() < ends_s:
            streams.of_threads(stream.device)
            streams.switch(stream)
    finally:
        stop.set()
        sys.setswitchinterval(before)
        for each in churning:
            each.join()


def test_the_current_stream_is_found_without_making_an_object_each_time() -> None:
    device = torch.device("cuda:0")
    first, second = _stream(), _stream()
    current = [(1, 0, 1), first]
    with (
        mock.patch.dict(current_streams_module._known, clear=True),
        mock.patch.object(torch._C, "_cuda_getCurrentStream", lambda index: current[0], create=True),
        mock.patch.object(torch.cuda, "is_initialized", lambda: True),
        mock.patch.object(torch.cuda, "current_stream", mock.Mock(side_effect=lambda device: current[1])) as makes,
    ):
        assert find_current_stream(device) is find_current_stream(device) is first
        current[:] = [(2, 0, 1), second]
        assert find_current_stream(device) is find_current_stream(device) is second
        current[:] = [(1, 0, 1), None]
        assert find_current_stream(device) is first
        assert makes.call_count == 2
