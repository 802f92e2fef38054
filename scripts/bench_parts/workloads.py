"""What all arms train: a network, one batch for it, and the parts that FSDP2 shards one by one."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench_parts import paced, real
from bench_parts.settings import CaseSettings


class Workload(NamedTuple):
    """What one case trains.

    `build()` makes a fresh network with the same weights each time. `loss(network)` is one forward, with the same batch
    each time. `units(network)` are the parts that FSDP2 shards one by one. `pace` is set for paced layers.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    units: Callable[[nn.Module], list[nn.Module]]
    pace: paced.Pace | None = None


def make_workload(settings: CaseSettings) -> Workload:
    """The workload of a case; paced layers do not sleep until their pace is set."""
    if settings.workload != "paced":
        model = real.MODELS[settings.workload](settings.tokens)
        return Workload(_seeded(model.build), model.loss, model.units)
    pace = paced.Pace(0.0)
    layers = settings.blocks * settings.weights_per_block
    sizes = paced.layer_sizes(settings.parameters, layers, settings.profile)
    x = torch.ones(1)
    return Workload(
        lambda: paced.paced_network(sizes, settings.blocks, pace),
        lambda network: network(x).sum(),
        lambda network: list(network.children()),
        pace,
    )


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build_seeded() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return build_seeded
