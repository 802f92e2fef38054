"""Which threads can be in no operator, as far as one can see from outside."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ddp_crossover.pending import other_threads
from ddp_crossover.pending.other_threads import OtherThreads
from ddp_crossover.torch_internals.profiling import let_handlers_look_up

NAME = "bystander"
LONG_S = 0.05  # longer than a thread waits for the interpreter's lock
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread has slept")


@pytest.fixture(autouse=True)
def _without_the_tests_own_threads(monkeypatch) -> None:
    """Those of pytest and its plugins."""
    frames, others = sys._current_frames, set(sys._current_frames())
    monkeypatch.setattr(sys, "_current_frames", lambda: {i: f for i, f in frames().items() if i not in others})


@contextlib.contextmanager
def _beside(work: Callable[[], object], name: str = NAME) -> Iterator[None]:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    time.sleep(LONG_S)
    assert thread.is_alive()
    yield


def _wait_for_work_of_a_pool() -> None:
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    queue.Queue[None]().get()


def _receive(one: socket.socket, other: socket.socket) -> None:
    one.recv(1)
    other.close()


WAITS: dict[str, Callable[[], object]] = {
    "event": lambda: threading.Event().wait(),
    "queue": lambda: queue.Queue[None]().get(),
    "idle_pool": _wait_for_work_of_a_pool,
    "join": lambda: threading.main_thread().join(),
}
SLEEPS: dict[str, Callable[[], object]] = {
    "sleep": lambda: time.sleep(100),
    "pipe": lambda: os.read(os.pipe()[0], 1),
    "socket": lambda: _receive(*socket.socketpair()),
    "simple_queue": lambda: queue.SimpleQueue[None]().get(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_of_the_standard_library_is_known_at_the_first_look(monkeypatch, wait) -> None:
    monkeypatch.setattr(other_threads, "_HAS_THREAD_CLOCKS", False)
    monkeypatch.setattr(other_threads, "_PATIENCE_S", 0.0)
    with _beside(wait):
        assert OtherThreads().find_straggler() is None


@LINUX
@pytest.mark.parametrize("sleep", SLEEPS.values(), ids=SLEEPS)
def test_a_thread_that_sleeps_is_in_no_operator_from_the_first_look_on(monkeypatch, sleep) -> None:
    monkeypatch.setattr(other_threads, "_PATIENCE_WITH_A_NEW_ONE_S", 5.0)  # on a busy machine
    monkeypatch.setattr(other_threads, "_PATIENCE_S", 0.0)
    threads = OtherThreads()
    with _beside(sleep):
        assert threads.find_straggler() is None
        assert threads.find_straggler() is None


def _compute() -> None:
    """One call of C for seconds, without the interpreter's lock, as an operator on a large tensor is."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)


def test_a_thread_in_a_long_call_is_named() -> None:
    with _beside(_compute, name="Thread-12 (measure)"):
        assert OtherThreads().find_straggler() == "Thread-* (measure)"


def test_a_thread_that_goes_on_in_python_has_left_its_operator(monkeypatch) -> None:
    monkeypatch.setattr(other_threads, "_PATIENCE_WITH_A_NEW_ONE_S", 20.0)  # it changes place where it likes
    ends = threading.Event()

    def count() -> None:
        total = 0
        while not ends.is_set():
            total += 1
            total -= 1

    with _beside(count):
        assert OtherThreads().find_straggler() is None
        ends.set()


@pytest.mark.parametrize("name", ["ddp_crossover-post", "QueueFeederThread", "Thread-3 (_pin_memory_loop)"])
def test_a_thread_that_is_known_to_use_no_parameters_may_do_what_it_likes(name: str) -> None:
    with _beside(_compute, name=name):
        assert OtherThreads().find_straggler() is None


def test_no_line_of_python_runs_without_look_ups_while_a_range_of_torch_ends() -> None:
    let_handlers_look_up()
    seen: list[bool] = []

    def trace(frame, event, arg):
        frame.f_trace_opcodes = True
        seen.append(torch._C._is_torch_function_enabled())
        return trace

    before = sys.gettrace()
    with torch.autograd.profiler.record_function("range") as recorded:
        sys.settrace(trace)
    sys.settrace(before)
    assert len(seen) > 10 and all(seen)
    assert recorded.run_callbacks_on_exit is False
