"""Makes the workload that all arms of a case train."""

from collections.abc import Callable

import torch
from torch import nn

from bench_kit import paced
from bench_kit.training import Workload, paced_workload
from bench_parts import real
from bench_parts.settings import CaseSettings


def make_workload(settings: CaseSettings) -> Workload:
    """The workload of a case; paced layers do not sleep until their pace is set."""
    if settings.workload != "paced":
        workload = real.MODELS[settings.workload](settings.tokens)
        return workload._replace(build=_seeded(workload.build))
    pace = paced.Pace(0.0)
    layers = settings.blocks * settings.weights_per_block
    sizes = paced.layer_sizes(settings.parameters, layers, settings.profile)
    return paced_workload(sizes, settings.blocks, pace)


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build_seeded() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return build_seeded
