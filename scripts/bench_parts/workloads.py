"""Makes the workload that all arms of a case train."""

from bench_kit import paced
from bench_kit.training import Workload, paced_workload
from bench_parts import real
from bench_parts.settings import CaseSettings


def make_workload(settings: CaseSettings) -> Workload:
    """The workload of a case; paced layers do not sleep until their pace is set."""
    if settings.workload != "paced":
        return real.MODELS[settings.workload](settings.tokens)
    pace = paced.Pace(0.0)
    layers = settings.blocks * settings.weights_per_block
    sizes = paced.layer_sizes(settings.parameters, layers, settings.profile)
    return paced_workload(sizes, settings.blocks, pace)
