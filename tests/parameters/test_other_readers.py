"""The look for signal handlers and other threads."""

from __future__ import annotations

import _thread
import signal
import threading
from typing import Any

import pytest

from ddp_crossover.parameters import other_readers
from ddp_crossover.parameters.other_readers import note_autograd_thread, others_may_read


def _handle(*_: Any) -> None:
    """Stands for a handler that reads gradients."""


def test_with_a_handler_installed_nobody_looks_for_threads(monkeypatch) -> None:
    """The handler might interrupt that, and wait for a leg whose thread starts another one: both want the same lock."""
    monkeypatch.setattr(threading, "enumerate", lambda: pytest.fail("looked for threads"))
    before = signal.signal(signal.SIGUSR2, _handle)
    try:
        assert others_may_read()
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("is_of_autograd", [True, False])
def test_a_thread_of_autograd_that_has_logged_reads_nothing(monkeypatch, is_of_autograd: bool) -> None:
    """A C++ thread, as on a GPU those that run hooks, is among Python's threads once it has asked for its name."""
    asked, over, ended = threading.Event(), threading.Event(), threading.Event()
    others = set(threading.enumerate()) - {threading.current_thread()}  # the test's own
    everybody = threading.enumerate

    def run() -> None:
        if is_of_autograd:
            note_autograd_thread()
        assert threading.current_thread().name.startswith("Dummy")
        asked.set()
        over.wait()
        ended.set()

    monkeypatch.setattr(other_readers, "_SIGNALS", [])
    monkeypatch.setattr(other_readers, "_of_autograd", set())
    monkeypatch.setattr(threading, "enumerate", lambda: [thread for thread in everybody() if thread not in others])
    assert not others_may_read()
    _thread.start_new_thread(run, ())
    asked.wait()
    try:
        assert any(isinstance(thread, threading._DummyThread) for thread in threading.enumerate())
        assert others_may_read() is not is_of_autograd
    finally:
        over.set()
        ended.wait()
        for thread in threading.enumerate():
            if isinstance(thread, threading._DummyThread):
                del threading._active[thread.ident]  # it would stay for ever
