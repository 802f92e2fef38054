"""What a trace records where work is done on CUDA streams, on a model of them: there is no GPU to be had."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch

import ddp_crossover as dx
from fake_streams import FakeStream, fake_gpu
from traced_job import STEPS, Job


def nccl_spans() -> list[tuple[str, int, float, float]]:
    with fake_gpu(gather_writes=False):
        job = Job(True)
        job.settle()
        with job.timed.trace() as trace:
            job.train(STEPS)
            job.timed.synchronize()
        job.close()
        return [(span.kind, span.group, span.begin_s, span.end_s) for span in trace.spans()]


def test_nccl_legs_and_waits_are_noted(on_ranks) -> None:
    (spans,) = on_ranks(nccl_spans, 1)
    legs = {kind: [group for name, group, *_ in spans if name == kind] for kind in ("scatter", "gather", "wait")}
    groups = set(legs["scatter"])
    assert len(groups) > 2
    assert sorted(legs["scatter"]) == sorted(legs["gather"]) == sorted([*groups] * STEPS)
    # A stream waits for a leg before its update, and again when the buffer is filled anew.
    assert all(STEPS <= legs["wait"].count(group) <= 2 * STEPS for group in groups)


class TimedEvent:
    """An event whose time the host can tell."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert enable_timing
        self.waited_for = False

    def record(self, stream: Any) -> None:
        # The device is late: it gets to what the host has queued only after a while.
        self.at_s = time.perf_counter() + stream.late_s

    def synchronize(self) -> None:
        self.waited_for = True

    def elapsed_time(self, end: TimedEvent) -> float:
        assert end.waited_for
        return (end.at_s - self.at_s) * 1e3


def test_events_become_host_time() -> None:
    stream = FakeStream()
    stream.late_s = 0.0
    with (
        mock.patch.object(torch.cuda, "Event", TimedEvent),
        mock.patch.object(torch.cuda, "synchronize", lambda device: None),
        mock.patch.object(torch.cuda, "current_stream", lambda device: stream),
    ):
        trace = dx.Trace(device=torch.device("cuda", 0))
        stream.late_s = 5.0
        before_s = time.perf_counter()
        trace.add("forward", trace.now(), trace.now())
        trace.add("scatter", before_s, before_s + 1)  # a leg of the host, on gloo
        trace.stop()
        scatter, forward = trace.spans()
    assert scatter.interval == (before_s, before_s + 1)
    assert forward.begin_s - before_s == pytest.approx(5.0, abs=1.0)
    assert forward.begin_s <= forward.end_s <= trace.ended_s
