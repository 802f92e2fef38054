"""`scripts/gpu_check.py`: its parts, and what is left of a run that is killed. All on a CPU, as a rehearsal."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_check
import launched
from bench_kit.ranks import Launch, run_check
from gpu_bench_parts.workloads import SMALL
from gpu_check_parts.host import host_and_memory
from gpu_check_parts.parts import PARTS

LONGEST_PART_S = 480
RUN_TIMEOUT_S = 240
GLOO = {"GLOO_SOCKET_IFNAME": "lo"}


def start(*arguments: object) -> subprocess.Popen[str]:
    command = (launched.SCRIPTS / "gpu_check.py", "--device", "cpu", "--jobs", "1", *arguments)
    return launched.start(*command, start_new_session=True)


def in_session(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *rest = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(rest[2]) == session and state != "Z":
            found.append(int(status.parent.name))
    return found


def ended_cases(file: Path) -> list[dict[str, Any]]:
    """Cases of a record that were over when it was written."""
    if not file.exists():
        return []
    return [case for case in json.loads(file.read_text())["cases"] if case["result"] != "under way"]  # a whole file


def test_the_list_says_what_each_part_tells_and_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--list"]) == 0
    printed = capsys.readouterr().out
    names = [part.name for part in PARTS]
    assert [line.split()[0] for line in printed.splitlines() if line.split()[:1] and line.split()[0] in names] == names
    assert all(f"{part.limit_s:.0f}" in printed and part.learns in printed for part in PARTS)
    assert max(part.limit_s for part in PARTS) < LONGEST_PART_S


@pytest.mark.nightly
def test_a_run_that_is_killed_loses_no_case_and_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "new" / "gpu.json"
    job = start("--part", "exact", "--json", file)
    try:
        deadline_s = time.monotonic() + RUN_TIMEOUT_S
        while len(ended_cases(file)) < 2:
            assert job.poll() is None and time.monotonic() < deadline_s, job.communicate()[0]
            time.sleep(0.02)
    finally:
        job.kill()
    assert job.wait() == -signal.SIGKILL
    record = json.loads(file.read_text())
    assert record["ended"] is False
    assert len(ended_cases(file)) >= 2
    for case in ended_cases(file):
        assert (case["part"], case["result"], case["largest_difference"]) == ("exact", "ok", 0.0)
    deadline_s = time.monotonic() + 30
    while in_session(job.pid) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not in_session(job.pid)


@pytest.mark.xdist_group("gpu_check")
@pytest.mark.nightly
def test_a_rehearsal_runs_what_it_can_and_says_what_it_cannot(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    job = start("--part", "smoke", "--part", "killed-rank", "--json", file)
    printed = launched.finish(job, RUN_TIMEOUT_S)
    assert job.returncode == 0, printed
    record = json.loads(file.read_text())
    assert record["ended"] is True
    results = {case["case"]: case["result"] for case in record["cases"]}
    assert results["AdamW, the bits of plain DDP"] == "ok"
    assert results["sleep kernels are as long as asked for"] == results["NCCL, pipeline"] == "skip"
    (killed,) = [case for case in record["cases"] if case["case"] == "gloo, pipeline"]
    survivor = killed["ranks"][0]
    assert killed["result"] == "ok" and survivor["raised"] == "LegError" and "rank" in survivor["message"]
    assert "needs a GPU" in printed and "says nothing about a GPU" in printed


def count_then_fail(device: torch.device) -> Iterator[dict[str, Any]]:
    yield {"rounds": 1}
    yield {"rounds": 2}
    raise RuntimeError("out of paper")


def test_what_a_check_has_handed_over_is_kept_when_it_fails() -> None:
    seen: list[Any] = []
    outcome = run_check(count_then_fail, (), Launch("gloo", ("cpu",), GLOO), 120.0, lambda all: seen.append([*all]))
    assert outcome.result == "FAIL" and "out of paper" in outcome.detail
    assert outcome.figures == [{"rounds": 2}] and seen == [[{"rounds": 1}], [{"rounds": 2}]]


def costs_of_the_host() -> dict[str, Any]:
    *_, figures = host_and_memory(torch.device("cpu"), SMALL, "SGD")
    return figures


def test_the_host_is_timed_where_the_package_spends_its_time(on_ranks) -> None:
    [figures] = on_ranks(costs_of_the_host, 1)
    for found in figures["fusion_mb"].values():
        assert {"bucket", "scatter leg", "gather leg", "wait for a group", "group update"} <= found["own_us"].keys()
