"""`scripts/bench_lease.py`: what it makes of its figures, and a whole run, as small as can be."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lab
import launched
from bench_kit.launch import CaseFailed
from bench_kit.rounds import jain_index
from bench_lease_parts import cases
from bench_lease_parts.cases import JOBS, CaseSettings, make_case
from bench_lease_parts.conductor import arms_of, run_case
from bench_lease_parts.figures import StepTimes, bound, in_proportion, print_case, steps_between, summarize
from bench_lease_parts.job import sizes_of_layers

RUN_TIMEOUT_S = 450


def case(name: str, *given: str) -> CaseSettings:
    return make_case(name, cases.parse_args("", ["--rounds", "2", "--window-s", "10", *given]))


def test_a_step_under_way_counts_in_part() -> None:
    ends_s = [0.0, 1.0, 2.0, 4.0]
    assert steps_between(ends_s, 0.5, 3.0) == pytest.approx(0.5 + 1 + 0.5)
    assert steps_between(ends_s, 0.0, 4.0) == 3
    with pytest.raises(AssertionError):
        steps_between(ends_s, 0.5, 4.5)


def test_the_bound_is_what_binds_first() -> None:
    device, link, job = StepTimes(0.3, 0.1, 0.4), StepTimes(0.1, 0.4, 0.45), StepTimes(0.2, 0.1, 0.9)
    assert bound([device, device]) == pytest.approx(0.8 / 0.6)
    assert bound([link, link]) == pytest.approx(0.9 / 0.8)
    assert bound([device, job]) == pytest.approx(1.3 / 0.9)
    assert bound([device]) == 1.0


def test_what_only_computes_counts_as_what_the_main_job_leaves() -> None:
    times = [StepTimes(0.3, 0.1, 0.4), StepTimes(0.01, 0.0, 0.011)]
    main, filler = in_proportion(times, case("filler"))
    assert main == times[0] and filler == pytest.approx((0.1, 0.0, 0.11))
    assert in_proportion(times, case("weights")) == times


def window(*steps: float) -> dict[int, dict[str, Any]]:
    """A window in which each job made so many steps on both hosts."""
    figures = {"run_s": 20.0, "grants": 80, "unleased": 1}
    return {job: {"steps": [count, count], **figures} for job, count in enumerate(steps)}


def measured(solo: tuple[float, ...], co_run: tuple[float, ...], lease: tuple[float, ...]) -> dict[str, Any]:
    names = "ab"
    a_round = {f"solo {names[job]}": window(count) for job, count in enumerate(solo)}
    # Each job's solo window has this job's key, as the conductor gives it.
    a_round = {name: {job: of[0]} for job, (name, of) in enumerate(a_round.items())}
    a_round |= {"solo leased": window(solo[0]), "co-run": window(*co_run), "lease": window(*lease)}
    return {
        "jobs": [{"parameters": 2_000_000, "compute_s": 0.3, "link_s": 0.1}] * len(solo),
        "rounds": [a_round] * 2,
    }  # fmt: skip


def test_progress_is_measured_in_solo_steps() -> None:
    # 25 steps alone in 10 s are 0.4 s each.
    result = summarize(case("equal"), measured(solo=(25, 25), co_run=(10, 15), lease=(16, 16)))
    co_run, leased = result["arms"]["co-run"], result["arms"]["lease"]
    assert co_run["over_serial"]["median"] == pytest.approx(25 * 0.4 / 10)
    assert leased["over_serial"]["median"] == pytest.approx(32 * 0.4 / 10)
    assert leased["over_co_run"]["median"] == pytest.approx(1.28)
    assert result["bound"] == pytest.approx(0.8 / 0.6)
    assert leased["of_bound"]["median"] == pytest.approx(1.28 / (0.8 / 0.6))
    assert [slower["median"] for slower in co_run["slower"]] == pytest.approx([1.5, 2 / 3])
    # Of 10 s, job a's 10 steps take 3 on the device; job b has 4.5 of the other 7.
    assert co_run["idle_filled"]["median"] == pytest.approx(4.5 / 7)
    assert co_run["jain"]["median"] == pytest.approx(jain_index([10, 15]))
    assert leased["unleased"]["median"] == 2 and leased["grants_per_s"]["median"] == pytest.approx(2 * 80 / 20 / 2)


def test_fairness_is_that_of_shares_over_weights() -> None:
    result = summarize(case("weights"), measured(solo=(100, 100), co_run=(50, 50), lease=(20, 80)))
    assert result["arms"]["lease"]["jain"]["median"] == pytest.approx(1)
    assert result["arms"]["co-run"]["jain"]["median"] == pytest.approx(jain_index([1, 0.25]))
    assert [share["median"] for share in result["arms"]["lease"]["device_share"]] == pytest.approx([0.2, 0.8])


@pytest.mark.parametrize("name", JOBS)
def test_tables_say_that_the_device_is_emulated_and_fit(name: str) -> None:
    settings = case(name)
    steps = tuple(25.0 for _ in settings.jobs)
    rounds = {f"solo {job.name}": {index: window(25)[0]} for index, job in enumerate(settings.jobs)}
    rounds |= {"solo leased": window(25), "co-run": window(*steps), "lease": window(*steps)}
    figures = measured((25,), (), ()) | {
        "rounds": [rounds],
        "jobs": [{"parameters": 10**6, "compute_s": 0.3, "link_s": 0.1}] * len(steps),
    }
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_case(console, summarize(settings, figures), "2 hosts")
    table = console.export_text()
    assert "EMULATED" in table and "…" not in table
    row = next(line for line in table.splitlines() if line.split()[:1] == ["lease"])
    assert len(row.rstrip()) <= 80


def test_every_job_runs_alone_and_all_run_together() -> None:
    arms = {arm.name: (arm.jobs, arm.network) for arm in arms_of(case("filler"))}
    assert arms == {
        "solo a": ((0,), "plain"), "solo filler": ((1,), "plain"), "solo leased": ((0,), "leased"),
        "co-run": ((0, 1), "plain"), "lease": ((0, 1), "leased"),
    }  # fmt: skip


def test_jobs_arrive_in_opposite_order() -> None:
    settings = case("opposite")
    delays_s = [[settings.start_delay_s(job, host) for job in (0, 1)] for host in (0, 1)]
    assert delays_s[0][0] < delays_s[0][1] and delays_s[1][0] > delays_s[1][1]
    assert case("equal").start_delay_s(1, 0) == 0


def test_most_of_an_embedding_heavy_network_is_in_its_first_layer() -> None:
    first, *others = sizes_of_layers(JOBS["equal"][0], 2_000_000)
    assert first == 1_800_000 and sum(others) == 200_000 and len(others) == 7
    assert sizes_of_layers(JOBS["weights"][0], 0) == [500] * 24


@pytest.mark.timeout(20, method="thread")  # a hang would not hear a signal
@pytest.mark.parametrize("end", [CaseFailed("out of paper"), KeyboardInterrupt()])
def test_a_case_without_its_ranks_ends(end: BaseException) -> None:
    def run_ranks(*_: object) -> None:
        time.sleep(0.3)  # the conductor waits for them by now
        raise end

    with pytest.raises(type(end)):
        run_case(case("equal"), 2, run_ranks, lambda doing, behind: None)


@pytest.mark.nightly
@pytest.mark.alone  # each emulated host wants a core of its own
@pytest.mark.skipif(lab.why_no_lab() is not None, reason="needs the rights to build a lab")
@pytest.mark.timeout(RUN_TIMEOUT_S + 30)
def test_a_whole_run(tmp_path: Path) -> None:
    json_file = tmp_path / "new" / "lease.json"
    small = "--cases filler --rounds 1 --window-s 1 --settle-s 0.5 --rehearse 2"
    arguments = [*small.split(), "--json", json_file]
    output = launched.run(launched.SCRIPTS / "bench_lease.py", *arguments, timeout_s=RUN_TIMEOUT_S)
    record = json.loads(json_file.read_text())
    (filler,) = record["cases"]
    assert "EMULATED" in output and "EMULATED" in record["configuration"]["device"] and filler["device"] == "emulated"
    assert set(filler["arms"]) == {"co-run", "lease"} and filler["bound"] > 1
    main, other = filler["jobs"]
    assert main["solo_s"] > main["compute_s"] and main["link_s"] > 0 and other["link_s"] == 0
    (a_round,) = filler["rounds"]
    assert all(steps > 0 for arm in a_round.values() for job in arm.values() for steps in job["steps"])
    # Both took part in the lease, and only where they were to.
    assert all(job["grants"] > 0 for job in a_round["lease"].values())
    assert all(job["grants"] == 0 for job in a_round["co-run"].values())
