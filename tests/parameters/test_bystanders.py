"""The look for signal handlers and other threads."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from ddp_crossover.parameters.bystanders import may_look


def _handle(*_: Any) -> None:
    """Stands for a handler that reads gradients."""


def test_with_a_handler_installed_nobody_looks_for_threads(monkeypatch) -> None:
    """The handler might interrupt that, and wait for a leg whose thread starts another one: both want the same lock."""
    monkeypatch.setattr(threading, "enumerate", lambda: pytest.fail("looked for threads"))
    before = signal.signal(signal.SIGUSR2, _handle)
    try:
        assert may_look()
    finally:
        signal.signal(signal.SIGUSR2, before)
