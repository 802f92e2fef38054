"""What runs inside each rank that the harness starts: tasks come through a pipe, answers go back."""

from __future__ import annotations

import gc
import io
import os
import signal
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reduced_as_built import watch_every_backward

_AT_EASE = ("_signal", "torch", "torch.utils.data._utils.signal_handling")


def rank_main(pipe: Connection, directory: Path, rank: int, world_size: int, group_timeout_s: float) -> None:
    """Run one task after another, each on a process group of its own, until told to leave."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    watch_every_backward()
    gc.freeze()  # else each collection looks at all that torch has imported, for 0.2 s
    store = dist.FileStore(str(directory / "store"), world_size)
    timeout = timedelta(seconds=group_timeout_s)
    run_number = 0
    while task := _next_task(pipe):
        _leave_group()
        run_number += 1
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"run{run_number}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        dist.barrier()  # a rank that dies at once must not break the connecting of the others
        if _answer(pipe, task):
            break
    _leave_group()


def _leave_group() -> None:
    """Only when all ranks have answered, as a new task says: one that leaves sooner fails those that still connect to
    it in a group that the task has made. Also ends such groups: with hundreds of runs their sockets would run out.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def _next_task(pipe: Connection) -> bytes:
    try:
        return pipe.recv()
    except EOFError:  # the test run itself has ended
        return b""


def _answer(pipe: Connection, task: bytes) -> bool:
    """Run one task and send back what it returned or raised. Returns whether it was to be the last."""
    try:
        fn, args, last = load(task)
    except Exception:
        pipe.send(dump((None, traceback.format_exc(), True)))
        return True
    try:
        result = fn(*args)
        answer = dump((result, None, _is_disturbed()))
    # SystemExit and KeyboardInterrupt are outcomes as well, and tests of faults ask for them.
    except BaseException:
        answer = dump((None, traceback.format_exc(), True))
    pipe.send(answer)
    return last


def _is_disturbed() -> bool:
    """Whether the task has left a thread or a signal handler, which would take part in the next one."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return any(callable(handler) and handler.__module__ not in _AT_EASE for handler in handlers) or any(
        thread is not threading.main_thread() and not thread.name.startswith("ddp_crossover-")
        for thread in threading.enumerate()
    )


def dump(value: Any) -> bytes:
    """For a pipe. Not pickle alone, which would hand tensors over in shared memory."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """What `dump` was given."""
    return torch.load(io.BytesIO(data), weights_only=False)
