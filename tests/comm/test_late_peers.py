"""A peer that is late is named while this rank waits for it, and nothing ends because of that."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch.distributed as dist

from ddp_crossover.comm import gloo_messages
from ddp_crossover.comm.gloo_messages import LONG_S, Awaited, LatePeers
from equivalence import SGD, Case, Run, snapshot, train_step
from harness import run_ranks
from heard import heard
from models import DeepNet

pytestmark = pytest.mark.launches

SCATTER, GATHER = "scatter leg of fusion group 3", "gather leg of fusion group 2"


def _said(caplog: pytest.LogCaptureFixture, *looks: tuple[float, list[Awaited]], timeout_s: float = 60.0) -> list[str]:
    awaited: list[Awaited] = []
    late = LatePeers([4, 5, 6], 0, timeout_s, lambda: awaited)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ddp_crossover"):
        for now_s, seen in looks:
            awaited = seen
            late.look(now_s)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.quick
def test_a_long_wait_is_reported_once_with_rank_leg_and_seconds(caplog) -> None:
    wait = [Awaited(1, SCATTER, True, False, 100.0)]
    assert _said(caplog, (100.0 + LONG_S - 1, wait)) == []
    [line] = _said(caplog, (112.0, wait), (115.0, wait), (130.0, wait))
    assert line == (
        f"rank 4 has waited 12 s in the {SCATTER}, because rank 5 has not sent its part; "
        "the job ends with an error when a wait reaches 60 s"
    )


def test_a_peer_that_was_back_is_reported_again(caplog) -> None:
    first, second = ([Awaited(1, SCATTER, True, False, since_s)] for since_s in (0.0, 50.0))
    assert len(_said(caplog, (20.0, first), (30.0, []), (70.0, second))) == 2


def test_a_rank_that_waits_itself_is_not_blamed_for_another(caplog) -> None:
    """Rank 6 has not gathered, because rank 5 has not scattered."""
    waits = [Awaited(2, GATHER, False, False, 0.0), Awaited(1, SCATTER, True, False, 1.0)]
    [line] = _said(caplog, (20.0, waits))
    assert "because rank 5 has not sent" in line and "unless" not in line
    [line] = _said(caplog, (20.0, waits[:1]))
    assert "rank 6 has not sent its part, unless it waits for another rank itself" in line
    [line] = _said(caplog, (20.0, [waits[0]._replace(is_send=True)]))
    assert "rank 6 does not receive" in line


def test_a_long_timeout_means_more_patience(caplog) -> None:
    wait = [Awaited(1, SCATTER, True, False, 0.0)]
    assert _said(caplog, (29.0, wait), timeout_s=1800) == []
    assert len(_said(caplog, (31.0, wait), timeout_s=1800)) == 1


@contextmanager
def _soon() -> Iterator[list[str]]:
    """Waits are long after a second; yields what is logged."""
    with (
        heard() as lines,
        mock.patch.object(gloo_messages, "LONG_S", 1.0),
        mock.patch.object(gloo_messages, "LONG_SHARE", 0.0),
    ):
        yield lines


def _train_with_a_stop(stops: bool, schedule: str) -> tuple[list[str], dict]:
    """The last rank is stopped in the middle, until its peers must have noticed, and goes on."""
    with _soon() as lines:
        run = Run(Case(model=DeepNet, optimizer=SGD, dear={"schedule": schedule}), with_dear=True)
        for index, (x, y) in enumerate(run.batches()):
            if stops and index == 5 and run.rank == dist.get_world_size() - 1:
                # A stopped process cannot wake itself.
                wake = f"import os, signal, time; time.sleep(5); os.kill({os.getpid()}, signal.SIGCONT)"
                with subprocess.Popen([sys.executable, "-c", wake]):
                    os.kill(os.getpid(), signal.SIGSTOP)
            train_step(run, x, y)
        run.detach()
        return [line for line in lines if "has waited" in line], snapshot(run.model.module.state_dict())


@pytest.mark.parametrize(("world_size", "schedule"), [(3, "auto"), (2, "allreduce")])
def test_a_stopped_rank_is_named_by_its_peers_and_training_goes_on_unchanged(world_size, schedule) -> None:
    *waiting, (_, stopped) = run_ranks(_train_with_a_stop, world_size, True, schedule)
    late = world_size - 1
    for rank, (lines, _) in enumerate(waiting):
        assert lines and lines[0].startswith(f"rank {rank} has waited ")
        # It does not send and does not receive. In a gather leg a rank may miss another one first, which itself waits
        # for the stopped rank; it says so.
        is_named = (
            f"because rank {late} has not sent its part" in lines[0] or f"rank {late} does not receive" in lines[0]
        )
        assert is_named or (world_size > 2 and "unless it waits for another rank itself" in lines[0])
        assert "leg of fusion group " in lines[0]
    _, plain = run_ranks(_train_with_a_stop, world_size, False, schedule)[-1]
    assert all((stopped[name] == value).all() for name, value in plain.items())
