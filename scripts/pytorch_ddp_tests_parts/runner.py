"""Runs one of PyTorch's tests on a few ranks, each a process of its own that ends with the test."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import everywhere, without_gpu

_GROUP_TIMEOUT_S = 30.0


class Outcome(NamedTuple):
    """How a test ended.

    Attributes:
        result: ``"passed"``, ``"failed"``, ``"skipped"`` or ``"hung"``.
        reason: the last line of the error, or why it was skipped.
        not_attached: why some of its models were not attached.
        attached: how many models were.
    """

    result: str
    reason: str = ""
    not_attached: tuple[str, ...] = ()
    attached: int = 0


def load(ranks: int) -> Any:
    """The class that holds the tests, for CPUs. Changes torch in this process."""
    without_gpu.pretend(ranks)
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="pytorch-ddp-tests-"))
    from torch.testing._internal.distributed import distributed_test

    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        pass

    return Tests


def names(tests: Any) -> list[str]:
    """The tests that have to do with DDP."""
    functions = inspect.getmembers(tests, lambda member: inspect.isfunction(member))
    about = re.compile("DistributedDataParallel|ddp", re.IGNORECASE)
    return [name for name, function in functions if name.startswith("test_") and _mentions(about, name, function)]


def _mentions(about: re.Pattern[str], name: str, function: Any) -> bool:
    return bool(about.search(name) or about.search(inspect.getsource(inspect.unwrap(function))))


def run(tests: Any, name: str, ranks: int, *, attach: bool, timeout_s: float) -> Outcome:
    """Run one test."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="pytorch-ddp-test-") as directory:
        os.environ["TEMP_DIR"] = directory
        for folder in ("barrier", "test_dir", "init_dir"):
            os.mkdir(os.path.join(directory, folder))
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(tests, name, rank, ranks, directory, attach, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        outcomes = _collect(pipes, timeout_s)
        for process in processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
    order = ("hung", "failed", "skipped", "passed")
    return min(outcomes, key=lambda outcome: order.index(outcome.result))


def _collect(pipes: list[Connection], timeout_s: float) -> list[Outcome]:
    deadline_s = time.monotonic() + timeout_s
    outcomes: list[Outcome] = []
    waiting = list(pipes)
    while waiting:
        ready = wait(waiting, max(deadline_s - time.monotonic(), 0.0))
        if not ready:
            return [*outcomes, Outcome("hung", f"{len(waiting)} ranks still ran after {timeout_s:.0f} s")]
        for pipe in ready:
            assert isinstance(pipe, Connection)
            waiting.remove(pipe)
            try:
                outcomes.append(Outcome(*pipe.recv()))
            except EOFError:
                outcomes.append(Outcome("failed", "the process died"))
    return outcomes


def _rank_main(tests: Any, name: str, rank: int, ranks: int, directory: str, attach: bool, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if attach:
        everywhere.attach_everywhere()
    with open(os.path.join(directory, f"output-{rank}"), "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    test = tests(name)
    test.rank = rank
    test.file_name = os.path.join(directory, "store")
    timeout = timedelta(seconds=_GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", f"file://{test.file_name}", timeout, ranks, rank)
    result, reason = "passed", ""
    try:
        getattr(test, name)()
        test._barrier()
    except (unittest.SkipTest, SystemExit) as error:
        result, reason = "skipped", str(error)
    except BaseException as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
        where = traceback.extract_tb(error.__traceback__)[-1]
        result = "failed"
        reason = f"{type(error).__name__}: {lines[0]} ({os.path.basename(where.filename)}:{where.lineno})"
    pipe.send((result, reason, tuple(dict.fromkeys(everywhere.not_attached)), len(everywhere.attached)))
    pipe.close()
    os._exit(0)
