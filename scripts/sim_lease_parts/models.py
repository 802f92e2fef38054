"""What is trained: how compute and parameters are spread over layers, and how that is cut into fusion groups."""

import dataclasses
import math
from typing import NamedTuple

_LATENCY_S = 20e-6


@dataclasses.dataclass(frozen=True)
class Model:
    """A model on one GPU.

    Attributes:
        name: of the model.
        compute_s: what a step computes.
        parameters_mb: of all gradients, in MiB.
        stages: from the first to the last: part of the compute, part of the parameters, number of layers.
        host_s: what the host needs for a step's forward and backward with the pipeline.
        between_s: what it needs between backward and forward.
    """

    name: str
    compute_s: float
    parameters_mb: float
    stages: tuple[tuple[float, float, int], ...]
    host_s: float
    between_s: float = 5e-3


class Layer(NamedTuple):
    """One kernel in forward and one in backward; parts of the whole."""

    compute: float
    parameters: float


class Group(NamedTuple):
    """A fusion group: the layers whose gradients it carries, `first` is used first."""

    first: int
    last: int
    leg_s: float


_BLOCKS = 12


def _transformer(embedding: float) -> tuple[tuple[float, float, int], ...]:
    return ((0.01, embedding, 1), (0.98, 0.99 - embedding, 4 * _BLOCKS), (0.01, 0.01, 1))


_RESNET_STAGES = (
    (0.12, 0.0004, 2),
    (0.22, 0.0085, 10),
    (0.23, 0.048, 13),
    (0.28, 0.278, 19),
    (0.14, 0.586, 10),
    (0.01, 0.08, 1),
)

# docs/gpu.md: C, and A at 25 Gb/s; the compute of a step is that of plain DDP over no wire.
MODELS = {
    "resnet50": Model(
        "resnet50", 29.1e-3, 97.5, _RESNET_STAGES, host_s=43e-3,
    ),
    "vit_b_16": Model("vit_b_16", 57.9e-3, 330.0, _transformer(0.01), host_s=53e-3),
    "bert_base": Model("bert_base", 68.2e-3, 413.0, _transformer(0.22), host_s=50e-3),
}  # fmt: skip

# A of each at 25 Gb/s, in ms.
MEASURED_MS = {"resnet50": 49.3, "vit_b_16": 166.0, "bert_base": 207.9}
# Even layers and groups, and a host that is fast enough.
RATIO_MODEL = Model("even", 50e-3, 320.0, ((1.0, 1.0, 40),), host_s=25e-3)


def layers_of(model: Model) -> list[Layer]:
    """The layers, first to last; their parts add up to 1."""
    layers = [
        Layer(compute / count, parameters / count) for compute, parameters, count in model.stages for _ in range(count)
    ]
    compute = math.fsum(layer.compute for layer in layers)
    parameters = math.fsum(layer.parameters for layer in layers)
    return [Layer(layer.compute / compute, layer.parameters / parameters) for layer in layers]


def groups_of(model: Model, all_reduce_s: float, fusion_mb: float) -> list[Group]:
    """The fusion groups in arrival order, where all of the gradients take `all_reduce_s` in both legs together."""
    layers = layers_of(model)
    groups: list[Group] = []
    last, share = len(layers) - 1, 0.0
    for index in reversed(range(len(layers))):
        share += layers[index].parameters
        if share * model.parameters_mb >= fusion_mb or index == 0:
            groups.append(Group(index, last, share * all_reduce_s / 2 + _LATENCY_S))
            last, share = index - 1, 0.0
    return groups
