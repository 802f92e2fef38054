"""The parts `wire-*`: what `gpu_bench.py` measures, of one model at two speeds."""

from collections.abc import Callable, Sequence

from gpu_bench_parts.rank import measure
from gpu_bench_parts.settings import CaseSettings
from gpu_bench_parts.workloads import SMALL
from gpu_check_parts.case import Case, one_rank
from gpu_check_parts.runner import Runner

SPEEDS_GBIT = (25.0, 10.0)
# So slow that the wire counts against the compute of a processor.
REHEARSAL_GBIT = (2.0,)
LIMIT_S = 220.0
# For starting the process, and for the steps that are traced in the end.
ENDS_S = 30.0


def runs(model: str) -> Callable[[Runner], None]:
    """The part of one model."""

    def run(runner: Runner) -> None:
        is_rehearsal = runner.device == "cpu"
        speeds = REHEARSAL_GBIT if is_rehearsal else SPEEDS_GBIT
        for place, gbit_per_s in enumerate(speeds):
            limit_s = min(LIMIT_S, _share_s(runner.left_s, speeds[place:]))
            settings = CaseSettings(
                SMALL if is_rehearsal else model,
                gbit_per_s,
                rounds=2 if is_rehearsal else 12,
                precision="fp32" if is_rehearsal else "bf16",
                limit_s=limit_s - ENDS_S,
            )
            name = f"{settings.name}{f', in place of {model}' if is_rehearsal else ''}"
            case = Case("wire", name, measure, (settings,), one_rank(runner.device), alone=True, limit_s=limit_s)
            runner.run_all([case])

    return run


def _share_s(left_s: float, speeds_gbit: Sequence[float]) -> float:
    """Seconds for the first of these speeds, so that all fit in: steps take the longer, the slower the wire is."""
    of_rounds_s = max(0.0, left_s - ENDS_S * len(speeds_gbit))
    return ENDS_S + of_rounds_s / speeds_gbit[0] / sum(1 / speed for speed in speeds_gbit)
