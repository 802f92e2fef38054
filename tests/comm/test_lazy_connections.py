"""`TORCH_GLOO_LAZY_INIT=1`: gloo connects two ranks when they first talk, and training is what it is without."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from equivalence import Case, compare_arms
from harness import run_ranks
from models import DeepNet


def _over_lazy_connections(options: dict[str, Any]) -> None:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    compare_arms(Case(model=DeepNet, ddp={"process_group": dist.new_group()}, dear=options))


@pytest.mark.launches
@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["plain", "sharded"])
def test_lazy_connections_change_nothing(options: dict[str, Any]) -> None:
    run_ranks(_over_lazy_connections, 3, options)
