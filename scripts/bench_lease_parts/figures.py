"""Turns the figures of windows into the record, and shows them. Pure but for `print_case`.

*Throughput* of a window counts every job's progress in seconds of its own solo step: the sum over jobs of (steps in the
window) * T_i, over the length of the window. Jobs one after the other make 1, whatever they are, so it is the speed-up
over serial. The *bound* is for jobs that progress at equal rates, a step of each in turn:

    S* = sum(T_i) / max(sum(c_i), max(T_i), sum(n_i))

with c the time of a step's compute alone, n of its communication alone, and T of a solo step with both: no device, link
or job can be more than busy. What the host computes between kernels counts as compute: on a GPU it would be kernels.
"""

import bisect
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console

from bench_kit.rounds import jain_index, spread
from bench_kit.tables import print_table
from bench_lease_parts.cases import MEANING, CaseSettings


class StepTimes(NamedTuple):
    """Seconds that a job's step takes alone: compute, communication, both as they overlap."""

    compute_s: float
    link_s: float
    solo_s: float


def steps_between(ends_s: Sequence[float], start_s: float, end_s: float) -> float:
    """Steps between two moments, where a step that was under way counts in part.

    `ends_s` has the beginning of the first step, then the end of each, ascending; they enclose both moments.
    """

    def steps_at(time_s: float) -> float:
        assert ends_s[0] <= time_s <= ends_s[-1], "the job did not run all the time"
        before = max(1, bisect.bisect_left(ends_s, time_s))
        begin_s, over_s = ends_s[before - 1], ends_s[before]
        return before - 1 + (time_s - begin_s) / (over_s - begin_s)

    return steps_at(end_s) - steps_at(start_s)


def bound(jobs: Sequence[StepTimes]) -> float:
    """S*, see the top of this file."""
    device_s, link_s = sum(job.compute_s for job in jobs), sum(job.link_s for job in jobs)
    return sum(job.solo_s for job in jobs) / max(device_s, link_s, max(job.solo_s for job in jobs))


def in_proportion(jobs: Sequence[StepTimes], settings: CaseSettings) -> list[StepTimes]:
    """The jobs, where a step of one that only computes is as much of its work as the first job leaves device time.

    How much work such a job calls a step is arbitrary, and in S* every job makes one step. With this much no other mix
    of the jobs' work does better beside a training job.
    """
    idle_s = jobs[0].solo_s - jobs[0].compute_s
    scaled = []
    for job, each in zip(jobs, settings.jobs, strict=True):
        factor = idle_s / job.compute_s if settings.jobs[0].trains and not each.trains else 1.0
        scaled.append(StepTimes(*(factor * seconds for seconds in job)))
    return scaled


def summarize(settings: CaseSettings, measured: dict[str, Any]) -> dict[str, Any]:
    """One case, as in the JSON file, from what `Conductor.conduct` returned."""
    rounds = measured["rounds"]
    solos_s = [
        [settings.window_s / _steps(a_round[f"solo {job.name}"][index]) for a_round in rounds]
        for index, job in enumerate(settings.jobs)
    ]
    times = [
        StepTimes(prepared["compute_s"], prepared["link_s"], statistics.median(solo_s))
        for prepared, solo_s in zip(measured["jobs"], solos_s, strict=True)
    ]
    best = bound(in_proportion(times, settings))
    solos_of_rounds = list(zip(*solos_s, strict=True))
    per_round = {
        arm: [_of_window(settings, a_round[arm], times, solos, best)
              for a_round, solos in zip(rounds, solos_of_rounds, strict=True)]
        for arm in ("co-run", "lease")
    }  # fmt: skip
    for plain, leased in zip(per_round["co-run"], per_round["lease"], strict=True):
        leased["over_co_run"] = leased["over_serial"] / plain["over_serial"]
    solo_leased = [
        settings.window_s / _steps(a_round["solo leased"][0]) / solos[0] - 1
        for a_round, solos in zip(rounds, solos_of_rounds, strict=True)
    ]
    return {
        "case": settings.name,
        "device": "emulated",
        "settings": dataclasses.asdict(settings),
        "jobs": [
            {"name": job.name, "parameters": prepared["parameters"], **of_job._asdict()}
            for job, prepared, of_job in zip(settings.jobs, measured["jobs"], times, strict=True)
        ],
        "bound": best,
        "solo_slower_with_lease": spread(solo_leased),
        "arms": {arm: _over_rounds(of_rounds) for arm, of_rounds in per_round.items()},
        "rounds": rounds,
    }


def _steps(job: dict[str, Any]) -> float:
    return statistics.fmean(job["steps"])


def _of_window(
    settings: CaseSettings,
    window: dict[int, dict[str, Any]],
    times: Sequence[StepTimes],
    solos_s: Sequence[float],
    best: float,
) -> dict[str, Any]:
    """The figures of one window in which all jobs ran; `solos_s` are their solo steps in the same round."""
    steps = [_steps(window[index]) for index in range(len(settings.jobs))]
    over_serial = sum(n * solo_s for n, solo_s in zip(steps, solos_s, strict=True)) / settings.window_s
    device_s = [n * job.compute_s for n, job in zip(steps, times, strict=True)]
    peers = [index for index, job in enumerate(settings.jobs) if job.role == "peer"]
    return {
        "over_serial": over_serial,
        "of_bound": over_serial / best,
        "slower": [settings.window_s / n / solo_s - 1 for n, solo_s in zip(steps, solos_s, strict=True)],
        "idle_filled": sum(device_s[1:]) / (settings.window_s - device_s[0]),
        "device_share": [seconds / sum(device_s) for seconds in device_s],
        "jain": jain_index([device_s[index] / settings.jobs[index].weight for index in peers]),
        "grants_per_s": sum(job["grants"] / job["run_s"] for job in window.values()) / len(window[0]["steps"]),
        "unleased": float(sum(job["unleased"] for job in window.values())),
    }


def _over_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: [spread(values) for values in zip(*(a_round[key] for a_round in rounds), strict=True)]
        if isinstance(first, list)
        else spread([a_round[key] for a_round in rounds])
        for key, first in rounds[0].items()
    }


_HEADINGS = ("", "over serial", "of S*", "over co-run", "slower", "idle", "Jain", "/s")


def print_case(console: Console, case: dict[str, Any], network: str) -> None:
    """A table with a row for each way to run the jobs. It fits 80 columns, and says that the device is emulated."""
    times_s = [[job["compute_s"], job["link_s"], job["solo_s"]] for job in case["jobs"]]
    of_jobs = "; ".join(", ".join(f"{1e3 * time_s:.0f}" for time_s in of_job) for of_job in times_s)
    rows = [["serial", "1.00", f"{1 / case['bound']:.2f}"]]
    rows += ([name, *_cells(arm)] for name, arm in case["arms"].items())
    console.print(f"\n{case['case']}: {MEANING[case['case']]}; {network}\n  c, n, T in ms: {of_jobs}", markup=False)
    print_table(console, _HEADINGS, rows, padding=(0, 1, 0, 0))
    leased = case["arms"]["lease"]
    shares = ", ".join(f"{share['median']:.1%}" for share in leased["device_share"])
    notes = [
        f"EMULATED device; shares of it with the lease: {shares}",
        f"{case['jobs'][0]['name']} alone, with its lease on: {case['solo_slower_with_lease']['median']:+.1%} a step; "
        f"turns without the lease: {leased['unleased']['median']:.0f}",
    ]
    for note in notes:
        console.print(f"  {note}", markup=False)


def _cells(arm: dict[str, Any]) -> list[str]:
    def median(key: str, form: str) -> str:
        return format(arm[key]["median"], form) if key in arm else ""

    return [
        f"{median('over_serial', '.2f')} ({arm['over_serial']['low']:.2f}..{arm['over_serial']['high']:.2f})",
        median("of_bound", ".2f"),
        median("over_co_run", ".2f"),
        f"{arm['slower'][0]['median']:+.1%}",
        median("idle_filled", ".0%"),
        median("jain", ".3f"),
        median("grants_per_s", ".0f"),
    ]
