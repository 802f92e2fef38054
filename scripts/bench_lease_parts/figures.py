"""Turns the figures of windows into the record. Pure.

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

from bench_kit.rounds import jain_index, spread
from bench_lease_parts.cases import CaseSettings


class StepTimes(NamedTuple):
    """Seconds that a job's step takes alone: compute, communication, both as they overlap."""

    compute_s: float
    link_s: float
    solo_s: float


def steps_between(ends_s: Sequence[float], start_s: float, end_s: float) -> float:
    """Steps between two moments, where a step that was under way counts in part.

    Args:
        ends_s: the beginning of the first step, then the end of each, ascending; they enclose both moments.
        start_s: the first moment.
        end_s: the second one.
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
        beside_training = each.kind == "compute" and settings.jobs[0].kind == "training"
        factor = idle_s / job.compute_s if beside_training else 1.0
        scaled.append(StepTimes(*(factor * seconds for seconds in job)))
    return scaled


def summarize(settings: CaseSettings, measured: dict[str, Any]) -> dict[str, Any]:
    """One case, as in the JSON file.

    Args:
        settings: the case.
        measured: what `Conductor.conduct` returned.
    """
    solos_s = [
        [settings.window_s / _steps(a_round[f"solo {job.name}"][index]) for a_round in measured["rounds"]]
        for index, job in enumerate(settings.jobs)
    ]
    times = [
        StepTimes(prepared["compute_s"], prepared["link_s"], statistics.median(solo_s))
        for prepared, solo_s in zip(measured["jobs"], solos_s, strict=True)
    ]
    best = bound(in_proportion(times, settings))
    per_round = {
        arm: [_of_window(settings, a_round[arm], times, [solo_s[n] for solo_s in solos_s], best)
              for n, a_round in enumerate(measured["rounds"])]
        for arm in ("co-run", "lease")
    }  # fmt: skip
    for plain, leased in zip(per_round["co-run"], per_round["lease"], strict=True):
        leased["over_co_run"] = leased["over_serial"] / plain["over_serial"]
    solo_leased = [
        settings.window_s / _steps(a_round["solo leased"][0]) / solo_s - 1
        for a_round, solo_s in zip(measured["rounds"], solos_s[0], strict=True)
    ]
    return {
        "case": settings.name,
        "device": "emulated",
        "settings": dataclasses.asdict(settings),
        "device_kernel_excess_s": measured["device"]["kernel_excess_s"],
        "sleep_excess_s": measured["device"]["sleep_excess_s"],
        "link_bytes_per_s": measured["link_bytes_per_s"],
        "jobs": [
            {"name": job.name, "parameters": prepared["parameters"], **times[index]._asdict(),
             "solo_step_s": spread(solos_s[index])}
            for index, (job, prepared) in enumerate(zip(settings.jobs, measured["jobs"], strict=True))
        ],
        "bound": best,
        "solo_slower_with_lease": spread(solo_leased),
        "arms": {arm: _over_rounds(rounds) for arm, rounds in per_round.items()},
        "rounds": measured["rounds"],
        "facts": measured["facts"],
    }  # fmt: skip


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
    hosts = len(window[0]["steps"])
    return {
        "over_serial": over_serial,
        "of_bound": over_serial / best,
        "slower": [settings.window_s / n / solo_s - 1 for n, solo_s in zip(steps, solos_s, strict=True)],
        "idle_filled": sum(device_s[1:]) / (settings.window_s - device_s[0]),
        "device_share": [seconds / sum(device_s) for seconds in device_s],
        "jain": jain_index([device_s[index] / settings.jobs[index].weight for index in peers]),
        "grants_per_s": sum(job["grants"] / job["run_s"] for job in window.values()) / hosts,
        "unleased": sum(job["unleased"] for job in window.values()),
        **_gaps(window[0]),
    }


def _gaps(main: dict[str, Any]) -> dict[str, float]:
    """Which part of the first job's waits for communication another one was given, and computed in."""
    if not main.get("given_s"):
        return {}
    return {"waits_given": main["given_s"] / main["exposed_s"], "waits_filled": main["filled_s"] / main["exposed_s"]}


def _over_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and quartiles of each figure; sums of counts."""
    return {
        key: sum(a_round[key] for a_round in rounds)
        if key == "unleased"
        else [spread(values) for values in zip(*(a_round[key] for a_round in rounds), strict=True)]
        if isinstance(rounds[0][key], list)
        else spread([a_round[key] for a_round in rounds])
        for key in rounds[0]
        if all(key in a_round for a_round in rounds)
    }
