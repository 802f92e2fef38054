"""The parts `wire-*`: what `gpu_bench.py` measures, of one model at two speeds."""

from collections.abc import Callable

from gpu_bench_parts.rank import measure
from gpu_bench_parts.settings import CaseSettings
from gpu_bench_parts.workloads import SMALL
from gpu_check_parts.case import Case, one_rank
from gpu_check_parts.runner import Runner

SPEEDS_GBIT = (25.0, 10.0)
# So slow that the wire counts against the compute of a processor.
REHEARSAL_GBIT = (2.0,)
LIMIT_S = 160.0
# For starting the process, and for the first steps, in which cuDNN tries its algorithms.
START_S = 60.0


def runs(model: str) -> Callable[[Runner], None]:
    """The part of one model."""

    def run(runner: Runner) -> None:
        is_rehearsal = runner.device == "cpu"
        for gbit_per_s in REHEARSAL_GBIT if is_rehearsal else SPEEDS_GBIT:
            settings = CaseSettings(
                SMALL if is_rehearsal else model,
                gbit_per_s,
                rounds=2 if is_rehearsal else 12,
                precision="fp32" if is_rehearsal else "bf16",
                limit_s=LIMIT_S,
            )
            name = f"{settings.name}{f', in place of {model}' if is_rehearsal else ''}"
            case = Case(
                "wire", name, measure, (settings,), one_rank(runner.device), alone=True, limit_s=LIMIT_S + START_S
            )
            runner.run_all([case])

    return run
