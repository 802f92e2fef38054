"""What is known of the streams that a script's threads are on."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ddp_crossover.torch_internals.current_streams import CurrentStreams


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


def test_threads_and_watchers_are_forgotten_when_they_end() -> None:
    streams = CurrentStreams(lambda stream: None)
    watcher, gone = Watcher(), Watcher()
    for each in (watcher, gone):
        streams.watch(each)
    seen = gone.seen
    streams.switch("main's")  # type: ignore[arg-type]
    del gone, each
    gc.collect()
    thread = threading.Thread(target=streams.switch, args=("another's",))
    thread.start()
    thread.join()
    streams.switch(None)  # does nothing, as torch says
    assert (watcher.seen, seen) == (["main's", "another's"], ["main's"])
    gc.collect()
    assert streams.of_threads() == {"main's"}
