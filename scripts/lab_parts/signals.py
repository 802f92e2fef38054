"""Signals that ask for an end: an exception while the lab works, put off while it cleans up."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


@contextlib.contextmanager
def ending_signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit where they would end the process on the spot."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    with contextlib.ExitStack() as stack:
        # Python runs handlers on the main thread and lets no other one set them.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    stack.callback(signal.signal, number, signal.signal(number, leave))
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that ask for an end wait until this is over: a second Ctrl-C must not stop the cleaning up."""
    came: list[int] = []
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if callable(signal.getsignal(number)):
                    stack.callback(signal.signal, number, signal.signal(number, lambda n, _: came.append(n)))
        yield
    for number in came[:1]:
        signal.raise_signal(number)
