"""Check everything that needs a GPU: exactness over NCCL and gloo, streams, no host synchronization.

    python scripts/gpu_check.py                          # everything, under 10 minutes
    python scripts/gpu_check.py --json gpu.json
    python scripts/gpu_check.py --only "own clipping"    # cases whose name contains this
    python scripts/gpu_check.py --device cpu             # no GPU needed: rehearses what can run without one

Exit code 0 if nothing failed (what is skipped says why), 1 if something failed or there was no time for it, 2 if there
is no GPU. See docs/gpu.md.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console

from bench_kit.options import add_results, make_parser
from bench_kit.ranks import Launch, Outcome, run_check
from bench_kit.record import write
from gpu_check_parts import cases, checks, report
from gpu_check_parts.cases import Case
from gpu_check_parts.report import Row

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


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose check or name contains this (all)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses without a GPU (%(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=3, metavar="N", help="cases side by side, where that is safe (%(default)s)"
    )
    parser.add_argument(
        "--budget-s", type=float, default=560.0, help="start no case after this many seconds (%(default)g)"
    )
    parser.add_argument("--timeout-s", type=float, default=90.0, help="seconds for one case (%(default)g)")
    add_results(parser)
    args = parser.parse_args()
    if args.jobs < 1 or args.budget_s <= 0 or args.timeout_s <= 0:
        parser.error("--jobs, --budget-s and --timeout-s must be greater than 0")
    return args


class Runner:
    """Runs cases one after another, or side by side, until the time is up."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args = args
        self.console = console
        self.start_s = time.monotonic()
        self.rows: list[Row] = []

    @property
    def elapsed_s(self) -> float:
        """Since the first case."""
        return time.monotonic() - self.start_s

    def wants(self, case: Case) -> bool:
        """Whether ``--only`` selects this case."""
        return self.args.only.lower() in f"{case.group} {case.name}".lower()

    def run_all(self, wanted: Iterable[Case]) -> None:
        """Run these cases; one that fails stops nothing."""
        chosen = [case for case in wanted if self.wants(case)]
        together = [case for case in chosen if not case.alone]
        with ThreadPoolExecutor(self.args.jobs) as pool:
            self.rows += pool.map(self.run, together)
        self.rows += map(self.run, (case for case in chosen if case.alone))

    def run(self, case: Case) -> Row:
        """Run one case and say at once how it went."""
        row = Row(case, self.outcome(case))
        style = report.STYLES[row.outcome.result]
        line = f"[{style}]{row.outcome.result:>7}[/] {case.group}: {case.name} ({row.outcome.seconds:.1f} s)"
        self.console.print(line, highlight=False)
        return row

    def outcome(self, case: Case) -> Outcome:
        """Run a case if that is possible, and judge its outcome."""
        left_s = self.args.budget_s - self.elapsed_s
        if left_s <= 0:
            return Outcome("not run", [], f"--budget-s {self.args.budget_s:g} was used up", 0.0)
        if case.needs_cuda and self.args.device == "cpu":
            return _skip("needs a GPU")
        # A case that is started late may overrun the budget, but not by much.
        limit_s = min(self.args.timeout_s, left_s + 20.0)
        outcome = run_check(case.check, case.arguments, case.launch, limit_s)
        digests = {figures["digest"] for figures in outcome.figures if "digest" in figures}
        if len(digests) > 1:
            return outcome._replace(result="FAIL", detail="ranks ended with different parameters")
        return outcome


def two_nccl_ranks(runner: Runner) -> tuple[Launch | None, str, str]:
    """A launch on which two ranks can communicate over NCCL, what it is called, and why others are not taken."""
    if torch.cuda.device_count() >= 2:
        return Launch("nccl", ("cuda:0", "cuda:1"), cases.ENVIRONMENT), "NCCL on two GPUs", ""
    reasons = ["there is one GPU"]
    for name, variables in (("NCCL on one GPU", SHARED_GPU), ("NCCL on one GPU as two hosts", AS_TWO_HOSTS)):
        if variables is SHARED_GPU and report.nccl_version() < SHARED_GPU_SINCE:
            reasons.append(f"NCCL before {'.'.join(map(str, SHARED_GPU_SINCE))} does not let two ranks share it")
            continue
        launch = Launch("nccl", ("cuda:0", "cuda:0"), {**cases.ENVIRONMENT, **variables})
        trial = Case("two ranks", f"trial of {name}", checks.can_communicate, (), launch)
        tried = Row(trial, runner.outcome(trial))
        works = tried.outcome.result == "ok"
        runner.console.print(f"{trial.name}: {'works' if works else 'does not work'}", highlight=False)
        if works:
            return launch, name, "; ".join(reasons)
        reasons.append(f"{name} was tried and failed: {tried.note}")
    return None, "", "; ".join(reasons)


def run_nccl_pairs(runner: Runner) -> None:
    """Two ranks over NCCL; rows that say why not, where they cannot be had."""
    nowhere = Launch("nccl", ("cuda:0", "cuda:0"), cases.ENVIRONMENT)
    wanted = [case for case in cases.two_rank_cases("cuda", nowhere, "two ranks, NCCL") if runner.wants(case)]
    if not wanted:
        return
    launch, name, reason = two_nccl_ranks(runner)
    if launch is None:
        reasons = [reason] + ["as above"] * (len(wanted) - 1)
        runner.rows += [Row(*pair) for pair in zip(wanted, map(_skip, reasons), strict=True)]
    else:
        runner.run_all(cases.two_rank_cases("cuda", launch, f"two ranks, {name}"))


def _skip(reason: str) -> Outcome:
    return Outcome("skip", [], reason, 0.0)


def run_everything(runner: Runner) -> None:
    """All groups of cases, those of one rank first."""
    device = "cpu" if runner.args.device == "cpu" else "cuda:0"
    runner.run_all(cases.one_rank_cases(device))
    gloo = Launch("gloo", (device, device), cases.ENVIRONMENT)
    runner.run_all(cases.two_rank_cases(device, gloo, "two ranks, gloo"))
    if device != "cpu":
        run_nccl_pairs(runner)


def failed(rows: Sequence[Row]) -> bool:
    """Whether a case failed or was not run for lack of time."""
    return any(row.outcome.result in ("FAIL", "not run") for row in rows)


def main() -> int:
    """Run the check; returns the exit code."""
    args = parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    if args.device == "cuda" and not torch.cuda.is_available():
        console.print(
            f"error: torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU, so nothing was checked. Run "
            "this on a machine with an NVIDIA GPU and its driver. --device cpu rehearses what can run without one.",
            style="bold red",
            highlight=False,
        )
        return 2
    if importlib.util.find_spec("ddp_crossover") is None:
        sys.path.append(str(Path(__file__).resolve().parent.parent))  # not installed: check this checkout
    about = report.environment(args.device)
    report.print_header(console, about)
    runner = Runner(args, console)
    try:
        run_everything(runner)
    finally:
        report.print_results(console, runner.rows, runner.elapsed_s)
        record = {
            "environment": about,
            "elapsed_s": round(runner.elapsed_s, 1),
            "cases": [row.as_json() for row in runner.rows],
        }
        write(record, args.json)
    return 1 if failed(runner.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
