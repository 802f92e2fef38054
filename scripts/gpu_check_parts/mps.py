"""A daemon of NVIDIA's Multi-Process Service of our own, under which processes share a GPU without time slices."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from bench_kit.ranks import Outcome
from gpu_check_parts import checks, report
from gpu_check_parts.case import Case, one_rank
from gpu_check_parts.runner import Runner

CONTROL = "nvidia-cuda-mps-control"
_TIMEOUT_S = 20.0
_LOG_TAIL_CHARACTERS = 600


def run_with_and_without(runner: Runner, make_cases: Callable[[str], Iterable[Case]]) -> None:
    """Run cases, then the same ones under MPS; where that cannot be had, say why.

    Args:
        runner: runs them.
        make_cases: given what to write behind a case's name.
    """
    runner.run_all(make_cases("without MPS"))
    wanted = [case for case in make_cases("with MPS") if runner.wants(case)]
    if not wanted:
        return
    if runner.device == "cpu":
        runner.skip_all(wanted, "needs a GPU")
        return
    with _daemon() as (environment, why_not):
        why_not = why_not or _why_not_in_use(runner, environment)
        if why_not:
            runner.skip_all(wanted, why_not)
        else:
            runner.run_all(_under(environment, case) for case in wanted)


@contextlib.contextmanager
def _daemon() -> Iterator[tuple[Mapping[str, str], str]]:
    """A daemon in private directories, so that it serves nobody else; it changes no setting of the GPU.

    Yields:
        The variables with which a process uses it; without a daemon, why there is none.
    """
    binary = shutil.which(CONTROL)
    if binary is None:
        yield {}, f"there is no {CONTROL} on this machine, so no MPS"
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-mps-") as directory:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": f"{directory}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{directory}/log"}
        for path in environment.values():
            os.mkdir(path)
        # Not through pipes: the daemon would keep them open, and we would wait for their end.
        with open(f"{directory}/start", "w+") as said:
            try:
                started = subprocess.run(
                    [binary, "-d"], env=os.environ | environment, stdout=said, stderr=said, timeout=_TIMEOUT_S
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                yield {}, f"MPS did not start: {error}"
                return
            said.seek(0)
            if started.returncode != 0:
                yield {}, f"MPS did not start: {said.read().strip()[-_LOG_TAIL_CHARACTERS:]}"
                return
        try:
            yield environment, ""
        finally:
            _tell(environment, "quit")


def _tell(environment: Mapping[str, str], command: str) -> str:
    """Give the daemon a command; returns its answer, empty if there is none."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=f"{command}\n",
            env=os.environ | dict(environment),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _why_not_in_use(runner: Runner, environment: Mapping[str, str]) -> str:
    """Processes fall back to time slices without a word, so ask the daemon whether it has served one."""
    trial = Case("MPS", "trial", checks.can_communicate, (), one_rank(runner.device), limit_s=60.0)
    outcome: Outcome = runner.outcome(_under(environment, trial))
    if outcome.result != "ok":
        return f"a process failed under MPS: {report.reason_of(outcome)} {_log_of(environment)}"
    if not _tell(environment, "get_server_list"):
        return f"MPS runs but has served nobody {_log_of(environment)}"
    return ""


def _log_of(environment: Mapping[str, str]) -> str:
    log = Path(environment["CUDA_MPS_LOG_DIRECTORY"], "control.log")
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return f"(its log ends: {text[-_LOG_TAIL_CHARACTERS:]})" if text else ""


def _under(environment: Mapping[str, str], case: Case) -> Case:
    return replace(case, launch=replace(case.launch, environment={**case.launch.environment, **environment}))
