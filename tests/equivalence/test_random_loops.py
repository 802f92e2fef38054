"""Loops that nobody would write: random sequences of what a script may do, against plain DDP, bit for bit.

Every step draws one of many things to do before backward, before `step()` and after it. The fuzzer draws whole programs
in this way, on 2 and 3 ranks; a few seeds of one rank, too, are kept here, beside the loop that random plans use.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from equivalence import ADAMW, SGD, Case, check_case, optimizer
from models import BatchNormNet, DeepNet, OddNet
from random_loops import random_loop
from wirings import SkippingNet, TiedNet

SEEDS = range(6)
MODELS = [DeepNet, OddNet, BatchNormNet, TiedNet, SkippingNet]


def _two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [torch.optim.SGD(parameters[:2], lr=0.05, momentum=0.9), torch.optim.AdamW(parameters[2:], lr=0.01)]


OPTIMIZERS = [SGD, ADAMW, optimizer(torch.optim.AdamW, lr=0.01, fused=True), _two_optimizers]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_loop_is_exact(on_ranks, seed) -> None:
    world_size = 1 + seed % 3
    draw = random.Random(1000 * world_size + seed)
    model = draw.choice(MODELS)
    ddp = {
        "gradient_as_bucket_view": draw.random() < 0.5,
        "find_unused_parameters": model is SkippingNet or draw.random() < 0.15,
    }
    case = Case(
        partial(random_loop, seed=seed),
        model=model,
        optimizer=draw.choice(OPTIMIZERS),
        world_size=world_size,
        steps=14,
        ddp=ddp,
        dear={"fusion_mb": draw.choice([1e-4, 3e-4, 8.0])},
        strict=draw.random() < 0.5,
        pipelined=False,  # many of these read too early to be fast
    )
    if draw.random() < 0.25:
        case = replace(case, dear={**case.dear, "wire_dtype": torch.bfloat16})
    check_case(case, on_ranks)
