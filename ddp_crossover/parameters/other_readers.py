"""Finds other threads and signal handlers that may read parameters while this thread makes them pending."""

from __future__ import annotations

import signal
import threading

# Threads that read no parameters: ours, those of data loaders (`multiprocessing` and pinning), progress bars and
# loggers. Not rich, whose threads call functions of users.
_NAMES = ("ddp_crossover-", "QueueFeederThread")
_TARGETS = ("(_pin_memory_loop)",)
_LIBRARIES = ("tqdm", "tensorboard")
# Signals sent by clusters, launchers and timers. Python's handler of Ctrl-C and torch's of SIGCHLD read no parameters.
_SIGNAL_NAMES = (
    *("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU"),
    *("SIGCONT", "SIGCHLD", "SIGRTMIN", "SIGRTMAX"),
)
_SIGNALS = [getattr(signal, name) for name in _SIGNAL_NAMES if hasattr(signal, name)]
_of_autograd: set[int] = set()


def note_autograd_thread() -> None:
    """Say that this is a thread of autograd's: it runs hooks, and reads no parameters beside this thread's backward.

    Once anything in it asks for its name, as a log record does, it is among Python's threads as long as the process.
    """
    _of_autograd.add(threading.get_ident())


def others_may_read() -> bool:
    """Whether the process has another thread, or a signal handler, that may read parameters."""
    # Handlers first: one that interrupts `enumerate`, which holds a lock, and waits for a leg whose thread starts
    # another thread just then, would wait forever.
    if any(callable(handler := signal.getsignal(number)) and not _reads_nothing(handler) for number in _SIGNALS):
        return True
    this = threading.current_thread()
    return any(thread is not this and not _reads_no_parameters(thread) for thread in threading.enumerate())


def _reads_no_parameters(thread: threading.Thread) -> bool:
    return (
        # Python has not started it, so it does not run a function of the script under an ident that is used again.
        (thread.ident in _of_autograd and isinstance(thread, threading._DummyThread))
        or thread.name.startswith(_NAMES)
        or thread.name.endswith(_TARGETS)
        or type(thread).__module__.partition(".")[0] in _LIBRARIES
    )


def _reads_nothing(handler: object) -> bool:
    return getattr(handler, "__module__", "").partition(".")[0] in ("_signal", "torch")
