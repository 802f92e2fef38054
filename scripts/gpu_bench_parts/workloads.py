"""What the arms train: the models of `bench.py` in sizes for a GPU, and a small one for a rehearsal."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench_kit.training import Workload
from bench_parts import real
from gpu_bench_parts.settings import CaseSettings

PIXELS = 224
BERT_TOKENS = 512


class Model(NamedTuple):
    """A model: its usual batch size, and how to make its workload, given a batch size and a device."""

    batch: int
    make: Callable[[int, torch.device], Workload]


def _images(name: str) -> Callable[[int, torch.device], Workload]:
    return lambda batch, device: real.classifier(name, PIXELS, batch, lambda network: [], device)


def _bert_base(batch: int, device: torch.device) -> Workload:
    return real.encoder(real.bert_base, BERT_TOKENS, real.BERT_VOCABULARY, batch, 2, device)


def _small(batch: int, device: torch.device) -> Workload:
    return real.encoder(lambda: real.Encoder(96, 128, 4, 256, 4, 96), 16, 96, batch, 96, device)


# Batches with which communication takes about as long as compute on an H100 at 25 Gb/s, by estimate.
MODELS = {
    "resnet50": Model(64, _images("resnet50")),
    "vit_b_16": Model(128, _images("vit_b_16")),
    "bert_base": Model(64, _bert_base),
    "small": Model(8, _small),
}
SMALL = "small"


def make_workload(settings: CaseSettings, device: torch.device) -> Workload:
    """The workload of a case, with the same weights in each arm."""
    model = MODELS[settings.model]
    workload = model.make(settings.batch or model.batch, device)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return workload.build()

    def loss(network: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            return workload.loss(network)

    return workload._replace(build=build, loss=loss)
