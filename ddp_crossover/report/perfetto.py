"""Reads and writes spans as a file of trace events, which ui.perfetto.dev and Chrome can show.

Source: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddp_crossover.report.spans import KINDS, LEASE_KINDS, LEG_KINDS, Span

_FORMAT = "ddp_crossover trace 2"


def write(path: Path, about: Mapping[str, Any], spans: list[Span]) -> None:
    """Write the file: one process for the rank, one thread for each lane; times in microseconds since 1970."""
    rank = about["rank"]
    lanes: dict[str, int] = {}
    events = []
    for span, lane in _in_lanes(spans):
        # Round to whole nanoseconds, so that nested spans stay nested.
        begin_ns, end_ns = (round((moment_s + about["wall_offset_s"]) * 1e9) for moment_s in span.interval)
        events.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": lanes.setdefault(lane, len(lanes)),
                "name": _name(span),
                "cat": span.kind,
                "ts": begin_ns / 1e3,
                "dur": (end_ns - begin_ns) / 1e3,
                "args": _arguments(span),
            }
        )
    process = f"{about['title']} rank {rank}".strip()
    labels = [_label(rank, 0, "process_name", name=process)]
    for lane, number in lanes.items():
        labels.append(_label(rank, number, "thread_name", name=lane))
        labels.append(_label(rank, number, "thread_sort_index", sort_index=number))
    document = {
        "traceEvents": labels + events,
        "displayTimeUnit": "ms",
        "otherData": {"format": _FORMAT, **about},
    }
    path.write_text(json.dumps(document) + "\n")


def read(path: Path) -> tuple[dict[str, Any], list[Span]]:
    """Read a file written by :func:`write`; returns ``about`` and the spans.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file was not written by this version of ddp_crossover.
    """
    try:
        document = json.loads(path.read_text())
        about = document["otherData"]
        ours = about["format"] == _FORMAT
    except (ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise ValueError(f"{path} is not a trace of this version of ddp_crossover: write one with Trace.save(path)")
    return about, [_span(event, about["wall_offset_s"]) for event in document["traceEvents"] if event["ph"] == "X"]


def _in_lanes(spans: list[Span]) -> Iterator[tuple[Span, str]]:
    """Pairs of span and lane. Overlapping legs of one kind get separate lanes, as viewers require."""
    busy_until_s: dict[str, list[float]] = {}
    for span in sorted(spans, key=lambda span: (KINDS.index(span.kind), span.begin_s)):
        if span.kind == "step":
            yield span, "steps"
        elif span.kind in LEASE_KINDS:
            yield span, f"lease of {span.detail}"
        elif span.kind not in LEG_KINDS:
            yield span, "compute"
        else:
            rows = busy_until_s.setdefault(span.kind, [])
            row = next((row for row, end_s in enumerate(rows) if end_s <= span.begin_s), len(rows))
            rows[row : row + 1] = [span.end_s]
            yield span, f"{span.kind} {row + 1}"


def _name(span: Span) -> str:
    if span.kind in LEASE_KINDS:
        return span.kind.replace("_", " ")
    return span.detail or (f"{span.kind} {span.group}" if span.group >= 0 else span.kind)


def _arguments(span: Span) -> dict[str, Any]:
    arguments: dict[str, Any] = {"group": span.group, "detail": span.detail}
    if span.posted_s == span.posted_s:  # not NaN, which JSON cannot express
        arguments["posted_after_us"] = (span.posted_s - span.begin_s) * 1e6
    return arguments


def _span(event: dict[str, Any], wall_offset_s: float) -> Span:
    begin_s, arguments = event["ts"] * 1e-6 - wall_offset_s, event["args"]
    return Span(
        kind=event["cat"],
        begin_s=begin_s,
        end_s=begin_s + event["dur"] * 1e-6,
        group=arguments["group"],
        posted_s=begin_s + arguments.get("posted_after_us", float("nan")) * 1e-6,
        detail=arguments["detail"],
    )


def _label(rank: int, lane: int, what: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": lane, "name": what, "args": arguments}
