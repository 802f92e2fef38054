"""Signals that ask a process to end: an exception while the lab works, put off while the lab is cleaned up.

A clean-up that a second Ctrl-C breaks off leaves namespaces behind. Installing other handlers when a clean-up begins is
not enough: the second Ctrl-C may arrive just before that, in the clean-up's first instruction. So one handler stays in
place as long as the lab does, and looks at the stack that it has interrupted: below a function that is marked with
`uninterrupted`, it only notes the signal.
"""

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

P = ParamSpec("P")
T = TypeVar("T")


class EndingHandler:
    """Handles one signal: at once, or after the clean-up that it has interrupted."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._before: Any = signal.getsignal(number)
        self._came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Called by Python on the main thread, between any two instructions."""
        if _is_uninterrupted(frame):
            self._came = True
        else:
            self._end(frame)

    def restore(self) -> None:
        """Put the handler back that was there before."""
        signal.signal(self._number, self._before)

    def catch_up(self) -> None:
        """Do now what was put off."""
        if self._came:
            self._came = False
            self._end(None)

    def _end(self, frame: FrameType | None) -> None:
        handle = self._before if callable(self._before) else _leave
        handle(self._number, frame)


@contextlib.contextmanager
def ending_signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit where they would end the process on the spot.

    Handlers that were there before are still called, and signals that are ignored stay ignored: a shell without job
    control ignores SIGINT in what it starts in the background, and nohup ignores SIGHUP.
    """
    handlers: list[EndingHandler] = []
    try:
        # Python runs handlers on the main thread and lets no other one set them.
        if threading.current_thread() is threading.main_thread():
            for number in ENDING_SIGNALS:
                before = signal.getsignal(number)
                if before in (signal.SIG_IGN, None) or isinstance(before, EndingHandler):
                    continue
                handlers.append(EndingHandler(number))
                signal.signal(number, handlers[-1])
        yield
    finally:
        # SIGINT comes last: from then on it may raise KeyboardInterrupt here.
        for handler in reversed(handlers):
            handler.restore()
        for handler in handlers:
            handler.catch_up()


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that must run to its end: signals that come meanwhile are handled when it returns.

    Only signals that `ending_signals_raise` handles are put off. Where such functions call each other, signals wait for
    the end of the outermost one.
    """

    @functools.wraps(function)
    def run_to_its_end(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        finally:
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and not _is_uninterrupted(sys._getframe().f_back):
                for number in ENDING_SIGNALS:
                    if isinstance(handler := signal.getsignal(number), EndingHandler):
                        handler.catch_up()

    return run_to_its_end


def _is_uninterrupted(frame: FrameType | None) -> bool:
    """Whether this frame, or one that has called it, is that of an uninterrupted function."""
    while frame is not None:
        if frame.f_globals is globals() and frame.f_code.co_name == "run_to_its_end":
            return True
        frame = frame.f_back
    return False


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
