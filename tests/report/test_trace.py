"""A trace shows what a real run did: which spans, in which order, nested how; and files bring it back."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ddp_crossover as dx
from ddp_crossover.report.spans import LEG_KINDS, Span
from models import DeepNet
from traced_job import SETTLED, STEPS, Job, traced

pytestmark = pytest.mark.quick


_MADE: dict[str, Any] = {}


@pytest.fixture
def saved_in(tmp_path_factory, on_ranks) -> Path:
    """Where the traces of one job are, which is run once for all tests that look at it."""
    if not _MADE:
        _MADE["path"] = path = tmp_path_factory.mktemp("traces")
        _MADE["traces"] = on_ranks(traced, 2, True, str(path))
    return _MADE["path"]


@pytest.fixture
def dear(saved_in) -> list[Any]:
    """What `traced` has returned on each rank."""
    return _MADE["traces"]


def of_kind(spans: list[Span], *kinds: str) -> list[Span]:
    return [span for span in spans if span.kind in kinds]


def contains(outer: Span, inner: Span) -> bool:
    return outer.begin_s <= inner.begin_s and inner.end_s <= outer.end_s


def test_every_phase_of_every_step_is_there(dear) -> None:
    for (spans, _, steps, *_), _ in dear:
        assert len(of_kind(spans, "forward")) == len(of_kind(spans, "backward")) == STEPS
        assert len(of_kind(spans, "step")) == len(steps) == STEPS - 1
        groups = {span.group for span in of_kind(spans, "scatter")}
        assert len(groups) > 2
        for step in of_kind(spans, "step"):
            inside = [span for span in spans if step.begin_s <= span.begin_s < step.end_s]
            assert {span.group for span in of_kind(inside, "scatter")} == groups
            assert {span.group for span in of_kind(inside, "gather")} == groups
            assert of_kind(inside, "update")  # the call of step()
        # Updates that were put off from one step are applied in the next one's forward, group by group.
        _, *later = of_kind(spans, "forward")
        updates = of_kind(spans, "update")
        assert all(len([u for u in updates if contains(forward, u)]) > 1 for forward in later)


def test_phases_follow_each_other_and_waits_are_inside_of_them(dear) -> None:
    for (spans, *_), _ in dear:
        phases = of_kind(spans, "forward", "backward")
        assert [phase.kind for phase in phases] == ["forward", "backward"] * STEPS
        assert all(before.end_s <= after.begin_s for before, after in pairwise(phases))
        for wait in of_kind(spans, "wait"):
            assert "fusion group" in wait.detail
            assert any(contains(phase, wait) for phase in phases)


def test_each_gather_ends_after_its_scatter_and_each_leg_is_posted_on_its_way(dear) -> None:
    for (spans, *_), _ in dear:
        for group in {span.group for span in of_kind(spans, "scatter")}:
            scatters = [span for span in of_kind(spans, "scatter") if span.group == group]
            gathers = [span for span in of_kind(spans, "gather") if span.group == group]
            # The last one may have been under way when the trace ended.
            assert len(scatters) >= len(gathers) >= STEPS - 1
            for scatter, gather in zip(scatters, gathers, strict=False):
                assert scatter.begin_s <= gather.begin_s
                assert scatter.end_s <= gather.posted_s <= gather.end_s
        for leg in of_kind(spans, *LEG_KINDS):
            assert leg.begin_s <= leg.posted_s <= leg.end_s


def test_scatters_begin_in_backward_and_gathers_outlive_it(dear) -> None:
    for (spans, *_), _ in dear:
        backwards, scatters = of_kind(spans, "backward"), of_kind(spans, "scatter")
        assert all(any(b.begin_s <= scatter.begin_s <= b.end_s for b in backwards) for scatter in scatters)
        assert any(b.end_s < gather.end_s for b in backwards for gather in of_kind(spans, "gather"))


def test_exposed_time_is_a_part_of_communication_and_of_the_step(dear) -> None:
    for (_, whole, steps, *_), _ in dear:
        for figures in (whole, *steps):
            assert 0 <= figures.exposed_s <= figures.communication_s <= figures.duration_s
            assert figures.compute_s + figures.exposed_s <= figures.duration_s * (1 + 1e-9)
            assert figures.compute_s > 0
        # Not in each step: these are so short that all legs of one may be posted in the next.
        assert whole.communication_s > 0


def test_a_file_brings_back_the_trace(dear) -> None:
    for rank, (first, again) in enumerate(dear):
        assert first[3] == again[3] == rank
        assert first[4] == again[4]
        assert len(first[0]) == len(again[0])
        names = [sorted((s.kind, s.group, s.detail) for s in spans) for spans in (first[0], again[0])]
        assert names[0] == names[1]
        assert again[1] == pytest.approx(first[1], abs=1e-5 * len(first[0]))
        assert [s.posted_s == s.posted_s for s in again[0]].count(True) == len(of_kind(first[0], *LEG_KINDS))


def test_ranks_of_one_machine_line_up(dear) -> None:
    (first, *_), (second, *_) = (trace for trace, _ in dear)
    offsets = [trace[4] for trace, _ in dear]
    # The second rank has sent its part of a leg before the first can have all of it.
    for group in {span.group for span in of_kind(first, "scatter")}:
        ends = [s.end_s + offsets[0] for s in of_kind(first, "scatter") if s.group == group]
        posts = [s.posted_s + offsets[1] for s in of_kind(second, "scatter") if s.group == group]
        assert all(post_s < end_s + 1e-3 for post_s, end_s in zip(posts, ends, strict=False))


def test_the_file_is_trace_event_json(saved_in) -> None:
    document = json.loads((saved_in / "True-rank1.json").read_text())
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    assert {event["pid"] for event in events} == {1}
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    lanes: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] > 1e15  # microseconds since 1970
            lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert lanes.keys() == named
    # What a viewer can show in one lane is nested or apart.
    for spans in lanes.values():
        open_until: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            open_until = [until for until in open_until if until > begin + 0.5]
            assert all(end <= until + 0.5 for until in open_until)
            open_until.append(end)


def test_what_is_no_trace_is_refused(tmp_path) -> None:
    for number, text in enumerate(("", "[]", "{}", '{"otherData": {"format": "other"}, "traceEvents": []}')):
        file = tmp_path / f"{number}.json"
        file.write_text(text)
        with pytest.raises(ValueError, match=r"is not a trace .* Trace\.save"):
            dx.Trace.load(file)


def test_plain_ddp_is_traced_likewise(on_ranks, tmp_path) -> None:
    for (spans, whole, *_), _ in on_ranks(traced, 2, False, str(tmp_path)):
        kinds = {span.kind for span in spans}
        assert kinds == {"step", "forward", "backward", "all_reduce", "wait", "update"}
        backwards, waits = of_kind(spans, "backward"), of_kind(spans, "wait")
        assert len(backwards) == len(waits) == len(of_kind(spans, "update")) == STEPS
        assert all(map(contains, backwards, waits))
        for leg in of_kind(spans, "all_reduce"):
            assert any(contains(backward, leg) for backward in backwards)
        assert len({leg.group for leg in of_kind(spans, "all_reduce")}) > 2
        assert 0 < whole.exposed_s <= whole.wait_s + 1e-3


def test_plain_all_reduce_under_the_hook_waits_in_backward(on_ranks, tmp_path) -> None:
    for (spans, *_), _ in on_ranks(partial(traced, schedule="allreduce"), 2, True, str(tmp_path)):
        backwards, waits = of_kind(spans, "backward"), of_kind(spans, "wait")
        assert len(waits) == STEPS
        assert all(map(contains, backwards, waits))


def test_a_step_of_several_backwards_is_one_step(on_ranks, tmp_path) -> None:
    for (spans, *_), _ in on_ranks(traced, 2, True, str(tmp_path), 3):
        assert len(of_kind(spans, "forward")) == len(of_kind(spans, "backward")) == 3 * STEPS
        assert len(of_kind(spans, "step")) == STEPS - 1


def trace_twice() -> list[int]:
    """Spans of a trace right after it, and when more steps have followed; of another trace."""
    job = Job(True)
    job.train(SETTLED)
    with job.timed.trace() as trace:
        job.train(2)
        with pytest.raises(RuntimeError, match="traced already"), job.timed.trace():
            pass
        job.train(2)
    counts = [len(trace.spans())]
    job.train(3)
    counts.append(len(trace.spans()))
    with pytest.raises(KeyError), job.timed.trace() as failed:
        raise KeyError("of the script")
    with job.timed.trace() as second:  # the one before is not under way any more
        job.train(1)
    assert failed.ended_s <= second.ended_s < math.inf
    counts.append(len(second.spans()))
    assert not job.ddp._forward_hooks and not job.ddp._forward_pre_hooks
    job.close()
    return counts


def test_nothing_is_noted_outside_of_a_trace_and_an_error_of_the_script_ends_it(on_ranks) -> None:
    for within, later, second in on_ranks(trace_twice, 2):
        assert within == later
        assert 0 < second < within


def test_a_forgotten_trace_keeps_only_the_latest_spans() -> None:
    trace = dx.Trace(max_spans=10)
    for number in range(25):
        trace.add("forward", float(number), number + 0.5)
    assert [span.begin_s for span in trace.spans()] == [float(number) for number in range(15, 25)]


def stats_of_steps() -> tuple[Any, ...]:
    job = Job(True)
    job.train(1)
    none_yet = job.timed.stats().last_step
    job.train(SETTLED + 4)
    stats = job.timed.stats()
    job.close()
    return none_yet, stats.last_steps, stats


def test_stats_tell_of_single_steps(on_ranks) -> None:
    size = sum(p.nbytes for p in DeepNet().parameters())
    for none_yet, steps, stats in on_ranks(stats_of_steps, 2):
        assert none_yet is None
        assert len(steps) == SETTLED + 4
        assert stats.last_step == steps[-1]
        # 2 (n - 1) / n of it, in each step or, where a leg is posted late, in the next.
        assert sum(step.sent_bytes for step in steps) == pytest.approx(len(steps) * size, abs=1.1 * size)
        for step in steps:
            assert 0 <= step.exposed_s <= step.duration_s and 0 <= step.communication_s <= step.duration_s
            assert step.fallbacks == {}
        assert sum(step.communication_s for step in steps) > 0
