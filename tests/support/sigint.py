"""A user's Ctrl-C in tests that themselves run in the background.

A shell without job control ignores SIGINT in what it starts in the background, and children inherit that. A process
that a test interrupts must have the handling that it would have on a terminal.
"""

from __future__ import annotations

import signal


def default_sigint() -> None:
    """For `preexec_fn` of `subprocess.Popen`: SIGINT ends the new process, or raises KeyboardInterrupt in Python."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ignored_sigint() -> None:
    """For `preexec_fn` of `subprocess.Popen`: the new process ignores SIGINT, as one in the background does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
