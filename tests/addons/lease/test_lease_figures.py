"""Where a resource's time goes, in numbers; what `lease status --json` and `lease top` say of it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_crossover.addons.lease.broker.figures import ResourceFigures
from ddp_crossover.addons.lease.broker.jobs import JobKey
from ddp_crossover.addons.lease.command import with_shares
from lease_processes import TIMEOUT_S, LeaseProcesses, eventually
from sigint import default_sigint

A, B, F = JobKey(0, "a"), JobKey(0, "b"), JobKey(0, "filler")


def _of(figures: ResourceFigures, name: str) -> dict[str, Any]:
    return next(job for job in figures.as_dicts() if job["job"] == name)


def _seconds(job: dict[str, Any]) -> list[float]:
    return [job["held_s"], job["waited_s"], job["gap_s"], job["filled_s"]]


def test_each_moment_of_a_job_is_held_waited_or_gap() -> None:
    figures = ResourceFigures(100.0)
    figures.join(A, "peer", 100.0)
    figures.change(101.0, A, [])  # 1 s of gap that nobody fills
    figures.join(B, "peer", 102.0)
    figures.change(103.0, A, [B])
    figures.change(107.0, B, [])  # a hand-off
    figures.change(115.0, B, [A])
    figures.change(131.0, A, [])  # another one
    assert _seconds(_of(figures, "a")) == [6.0, 16.0, 9.0, 8.0]
    assert _seconds(_of(figures, "b")) == [24.0, 4.0, 1.0, 1.0]
    assert [job["handoffs"] for job in figures.as_dicts()] == [1, 1]


def test_waits_are_told_as_what_they_have_made_the_job_slower_by() -> None:
    job = {"job": "a", "uid": 0, "held_s": 3.0, "waited_s": 1.0, "gap_s": 1.0, "filled_s": 0.5, "handoffs": 0}
    status = with_shares({"pid": 1, "resources": [{"resource": "cpu:0", "jobs": [job]}]})
    [shares] = status["resources"][0]["jobs"]
    assert (shares["slower"], shares["waited"], shares["gap_filled"]) == (0.25, 0.2, 0.5)


def test_only_what_goes_straight_from_job_to_job_is_a_hand_off() -> None:
    figures = ResourceFigures(0.0)
    for key in (A, B):
        figures.join(key, "peer", 0.0)
    for second, holder in enumerate([A, None, B, B, None, B]):
        figures.change(float(second), holder, [])
    assert [job["handoffs"] for job in figures.as_dicts()] == [0, 0]


@given(st.lists(st.tuples(st.floats(-1, 5), st.sampled_from([None, A, B, F]), st.sets(st.sampled_from([A, B, F])))))
def test_no_time_is_lost_or_counted_twice(changes: list[tuple[float, JobKey | None, set[JobKey]]]) -> None:
    figures = ResourceFigures(0.0)
    for key in (A, B, F):
        figures.join(key, "peer", 0.0)
    now_s = newest_s = 0.0
    for step_s, holder, waiting in changes:
        now_s = newest_s + step_s  # a time that is a little old counts as none
        newest_s = max(newest_s, now_s)
        figures.change(now_s, holder, waiting)
    for job in figures.as_dicts():
        held_s, waited_s, gap_s, filled_s = _seconds(job)
        assert held_s + waited_s + gap_s == pytest.approx(newest_s, abs=1e-3)
        assert filled_s <= gap_s
    assert sum(job["held_s"] for job in figures.as_dicts()) <= newest_s + 1e-3


def test_a_job_that_has_left_is_forgotten() -> None:
    figures = ResourceFigures(0.0)
    figures.join(A, "peer", 0.0)
    figures.change(1.0, A, [])
    figures.change(5.0, None, [])
    figures.leave(A)
    figures.leave(A)
    figures.join(A, "peer", 7.0)
    figures.change(8.0, None, [])
    assert _seconds(_of(figures, "a")) == [0.0, 0.0, 1.0, 0.0]


def _status(held_s: float, gap_s: float, filled_s: float, pid: int = 1, handoffs: int = 0) -> dict[str, Any]:
    job = {"job": "a", "uid": 0, "held_s": held_s, "waited_s": 0.0, "gap_s": gap_s, "filled_s": filled_s}
    return {"pid": pid, "resources": [{"resource": "cpu:0", "jobs": [{**job, "handoffs": handoffs}]}]}


def test_shares_are_of_the_time_between_two_looks() -> None:
    now = with_shares(_status(4.0, 8.0, 6.0, handoffs=50), with_shares(_status(3.0, 5.0, 4.0, handoffs=10)))
    [job] = now["resources"][0]["jobs"]
    assert (job["held"], job["waited"], job["gap"]) == (0.25, 0.0, 0.75)
    assert job["gap_filled"] == pytest.approx(2 / 3, abs=1e-4)
    assert job["handoffs_per_s"] == 10


@pytest.mark.parametrize("before", [None, _status(3.0, 1.0, 1.0, pid=2), _status(9.0, 9.0, 1.0)])
def test_of_another_broker_or_an_earlier_job_of_that_name_nothing_is_subtracted(before: dict[str, Any] | None) -> None:
    [job] = with_shares(_status(4.0, 4.0, 1.0), before)["resources"][0]["jobs"]
    assert (job["held"], job["gap_filled"]) == (0.5, 0.25)


# ---- of real jobs


def _top(*arguments: str, directory: Path) -> list[str]:
    return [sys.executable, "-m", "ddp_crossover", "lease", "top", "--directory", str(directory), *arguments]


def test_figures_of_a_peer_with_gaps_and_a_filler(processes: LeaseProcesses, lease_directory: Path) -> None:
    processes.broker()
    main, filler = processes.actor("main"), processes.actor("filler", role="filler")
    main.start("take_turns", 1.0, 0.01, 0.01)
    filler.start("take_turns", 1.0, 0.002, 0.0)
    main.result(), filler.result()
    [resource] = with_shares(processes.status())["resources"]
    jobs = {job["job"]: job for job in resource["jobs"]}
    assert jobs["main"]["role"] == "peer" and jobs["filler"]["role"] == "filler"
    assert jobs["main"]["filled_s"] > 0 and jobs["main"]["filled_s"] <= jobs["main"]["gap_s"]
    assert jobs["filler"]["waited_s"] > 0
    # It holds in gaps only, but for the time that it takes to yield.
    assert jobs["filler"]["held_s"] <= jobs["main"]["filled_s"] + jobs["main"]["waited_s"] + 1e-3
    for job in jobs.values():
        assert job["handoffs"] > 5


def test_a_job_is_gone_with_its_last_process(processes: LeaseProcesses) -> None:
    processes.broker()
    ranks = [processes.actor("job"), processes.actor("job")]
    processes.actor("other")
    names = lambda: [job["job"] for job in processes.status()["resources"][0]["jobs"]]  # noqa: E731
    assert names() == ["job", "other"]
    ranks[0].call("close")
    ranks[0].call("pause", 0.05)
    assert names() == ["job", "other"]
    ranks[1].call("close")
    eventually(lambda: names() == ["other"])


def test_top_of_a_pipe_is_plain_text(processes: LeaseProcesses, lease_directory: Path) -> None:
    processes.broker()
    holder = processes.actor("holder")
    holder.call("acquire")
    command = _top("--once", "--interval", "0.1", directory=lease_directory)
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "80"})
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("cpu:0  held by holder, nobody waiting")
    assert lines[2].split()[:5] == ["holder", "peer", "0%", "100%", "0%"]
    command = _top("--once", "--json", "--interval", "0.1", directory=lease_directory)
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    [job] = json.loads(shown.stdout)["resources"][0]["jobs"]
    assert (job["held"], job["waited"], job["gap"]) == (1.0, 0.0, 0.0)


def test_top_on_a_terminal_follows_until_it_is_told_to_end(processes: LeaseProcesses, lease_directory: Path) -> None:
    processes.broker()
    assert processes.raw().hello("early")
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    environment.pop("LINES", None)
    command = _top("--interval", "0.2", directory=lease_directory)
    top = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, preexec_fn=default_sigint)
    seen = ""

    def read_until(text: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + 3 * TIMEOUT_S
        while text not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 0.1)[0]:
                seen += os.read(ours, 1 << 16).decode(errors="replace")

    try:
        read_until("early")
        assert processes.raw().hello("later")
        read_until("later")
        top.send_signal(signal.SIGINT)
        assert top.wait(TIMEOUT_S) == 0
    finally:
        top.kill()
        top.wait()
        os.close(ours)
        os.close(its)
