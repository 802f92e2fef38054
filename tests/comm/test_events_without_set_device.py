"""A model on cuda:1 in a thread whose device is cuda:0, because nobody has called `torch.cuda.set_device`: all events
are on the model's device. On a model of devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddp_crossover import device as gpu
from ddp_crossover.comm.stream_order import StreamOrder
from ddp_crossover.nccl.nccl_link import NcclLink, _NcclLeg
from ddp_crossover.plan.compute_profiler import ComputeProfiler, Stopwatch
from ddp_crossover.report.clock import CommClock
from ddp_crossover.report.trace import Trace

THREADS, MODELS = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    """A stream of one device. `wait_event` is allowed for events of others, as on CUDA."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device(device or THREADS)
        self.waited_for: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)


class Event:
    """An event of the device on which it was recorded; `at_s` counts the records on all devices."""

    made: list[Event]

    def __init__(self, **options: Any) -> None:
        self.device: torch.device | None = None
        Event.made.append(self)

    def record(self, stream: Stream | None = None) -> None:
        self.device = (stream or torch.cuda.current_stream()).device
        self.at_s = len(Event.made)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert self.device is not None

    def elapsed_time(self, end: Event) -> float:
        if self.device != end.device:
            raise RuntimeError("both events must be recorded on the same device")
        return (end.at_s - self.at_s) * 1e3


@pytest.fixture(autouse=True)
def devices() -> Iterator[list[Event]]:
    current = {device: Stream(device) for device in (THREADS, MODELS)}

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        yield

    replacements = [
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event),
        (torch.cuda, "stream", on),
        (torch.cuda, "current_stream", lambda device=THREADS: current[device]),
        (torch.cuda, "synchronize", lambda device: None),
        (dist, "get_rank", lambda group: 0),
        (dist, "get_world_size", lambda group: 1),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        Event.made = []
        yield Event.made


def _link() -> NcclLink:
    group: Any = object()
    return NcclLink(group, MODELS, group, timedelta(minutes=1))


def test_compute_times(devices) -> None:
    stopwatch = Stopwatch(MODELS)
    parameter, model = torch.zeros(1), mock.Mock()
    profiler = ComputeProfiler(stopwatch, {id(parameter): 0})
    while not profiler.done:
        profiler.forward_begins(model)
        profiler.used([0])
        profiler.forward_ends(model, None, mock.Mock())
        with profiler.waiting("a leg"):
            pass
        profiler.bucket_arrives([parameter], is_first=True)
        profiler.backward_ends()
    assert profiler.profile().forward_s > 0
    assert {event.device for event in devices} == {MODELS}


def test_a_trace(devices) -> None:
    clock = CommClock()
    clock.trace = trace = Trace(device=MODELS)
    clock.span("update", clock.mark())
    ended = clock.all_reduce_started(0, MODELS)
    ended()
    trace.stop()
    assert [span.kind for span in trace.spans()] == ["update", "all_reduce"]
    assert {event.device for event in devices} == {MODELS}


def test_legs_and_the_order_of_streams(devices) -> None:
    link = _link()
    link.clock.trace = Trace(device=MODELS)
    order = StreamOrder(link.streams)
    order.mark()
    order.join()
    leg = _NcclLeg(link, "gather leg", 0, link._stream, gpu.record(link._stream))
    leg.wait()
    assert leg._done in torch.cuda.current_stream(MODELS).waited_for
    assert not torch.cuda.current_stream().waited_for
    assert {event.device for event in devices} == {MODELS}
