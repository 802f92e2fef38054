"""Runs one of PyTorch's tests on a few ranks, each a process of its own that ends with the test."""

from __future__ import annotations

import inspect
import os
import re
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench_kit.rank_processes import RankProcesses

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

    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
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
    ranks_of_test = RankProcesses(
        _rank_main,
        [(tests, name, rank, ranks, attach) for rank in range(ranks)],
        start_method="fork",  # with what `load` has changed in torch
        have_children=True,
    )
    try:
        outcomes = _collect(ranks_of_test, ranks, timeout_s)
    finally:
        ranks_of_test.end()
    order = ("hung", "failed", "skipped", "passed")
    return min(outcomes, key=lambda outcome: order.index(outcome.result))


def _collect(processes: RankProcesses, ranks: int, timeout_s: float) -> list[Outcome]:
    deadline_s = time.monotonic() + timeout_s
    outcomes: dict[int, Outcome] = {}
    while waiting := [rank for rank in range(ranks) if rank not in outcomes]:
        answers = processes.receive(waiting, deadline_s)
        if not answers:
            return [*outcomes.values(), Outcome("hung", f"{len(waiting)} ranks still ran after {timeout_s:.0f} s")]
        for rank, answer in answers.items():
            outcomes[rank] = Outcome("failed", "the process died") if answer is None else Outcome(*answer)
    return list(outcomes.values())


def _rank_main(pipe: Connection, directory: Path, tests: Any, name: str, rank: int, ranks: int, attach: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if attach:
        everywhere.attach_everywhere()
    os.environ["TEMP_DIR"] = str(directory)
    for folder in ("barrier", "test_dir", "init_dir"):
        (directory / folder).mkdir(exist_ok=True)
    test = tests(name)
    test.rank = rank
    test.file_name = str(directory / "store")
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
