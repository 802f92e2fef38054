"""Finds a way in which two ranks can communicate over NCCL here: two GPUs, or one that both share."""

import functools
from collections.abc import Callable, Iterable

import torch

from bench_kit.ranks import Launch
from gpu_check_parts import checks, report
from gpu_check_parts.case import ENVIRONMENT, Case
from gpu_check_parts.runner import Runner

# An experimental setting of NCCL 2.30 and later; see NCCL's list of environment variables.
SHARED_GPU_SINCE = (2, 30)
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
# Two ranks that take each other for other hosts, and so do not notice that they share a GPU.
AS_TWO_HOSTS = {
    "NCCL_HOSTID": "gpu-check-{rank}",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
NOWHERE = Launch("nccl", ("cuda:0", "cuda:0"), ENVIRONMENT)


def run_over_nccl(runner: Runner, make_cases: Callable[[Launch], Iterable[Case]]) -> None:
    """Run these cases on two ranks over NCCL; where they cannot be had, say why not."""
    wanted = [case for case in make_cases(NOWHERE) if runner.wants(case)]
    if not wanted:
        return
    launch, why_not = _find(runner)
    if launch is None:
        runner.skip_all(wanted, why_not)
    else:
        runner.run_all(make_cases(launch))


@functools.cache  # the ways are tried once in a run
def _find(runner: Runner) -> tuple[Launch | None, str]:
    """A launch of two ranks over NCCL; without one, why there is none."""
    if runner.device == "cpu":
        return None, "needs a GPU"
    if torch.cuda.device_count() >= 2:
        return Launch("nccl", ("cuda:0", "cuda:1"), ENVIRONMENT), ""
    reasons = ["there is one GPU"]
    for name, variables in (("one GPU", SHARED_GPU), ("one GPU as two hosts", AS_TWO_HOSTS)):
        if variables is SHARED_GPU and report.nccl_version() < SHARED_GPU_SINCE:
            reasons.append(f"NCCL before {'.'.join(map(str, SHARED_GPU_SINCE))} does not let two ranks share it")
            continue
        launch = Launch("nccl", ("cuda:0", "cuda:0"), {**ENVIRONMENT, **variables})
        trial = Case("two ranks, NCCL", f"trial of {name}", checks.can_communicate, (), launch, limit_s=60.0)
        outcome = runner.outcome(trial)
        runner.console.print(f"{trial.name}: {'works' if outcome.result == 'ok' else 'does not work'}", highlight=False)
        if outcome.result == "ok":
            return launch, ""
        reasons.append(f"NCCL on {name} was tried and failed: {report.reason_of(outcome)}")
    return None, "; ".join(reasons)
