"""What code looks up is read without running it, on every version of Python."""

from __future__ import annotations

import gc
import io
import itertools
import sys
import threading

import pytest

from ddp_crossover.cpython import Lookup, frames_of_threads, is_of_c, lookups, with_inner


def test_names_are_told_by_where_they_are_looked_up() -> None:
    def outer():
        import json

        def inner():
            return json.dumps(LIMIT)  # noqa: F821

        return inner

    found = [each for code in with_inner(outer.__code__) for each in lookups(code)]
    assert found == [(Lookup.MODULE, "json"), (Lookup.ATTRIBUTE, "dumps"), (Lookup.GLOBAL, "LIMIT")]


def test_classes_of_c_are_known_from_those_of_python() -> None:
    class OfPython(io.BytesIO):
        pass

    assert all(is_of_c(kind) for kind in (int, io.BytesIO, io.TextIOWrapper, io.FileIO, itertools.count))
    assert not is_of_c(OfPython)


def test_no_garbage_is_collected_while_frames_of_threads_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, collects = sys._current_frames, []

    def listed():
        collects.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", listed)
    assert threading.get_ident() in frames_of_threads()
    assert collects == [sys.version_info >= (3, 12)] and gc.isenabled()
    gc.disable()
    try:
        frames_of_threads()
        assert not gc.isenabled()
    finally:
        gc.enable()
