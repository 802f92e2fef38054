"""`TORCH_DISTRIBUTED_DEBUG=DETAIL`: torch compares collectives of ranks, and training is what it is without."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from equivalence import Case, compare_arms
from models import DeepNet


def _in_detail(options: dict[str, Any]) -> None:
    # Not by the environment, which is for the default group, too.
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        compare_arms(Case(model=DeepNet, dear=options))
    finally:
        dist.set_debug_level(before)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["plain", "sharded"])
def test_debug_level_changes_nothing(on_ranks, options: dict[str, Any]) -> None:
    on_ranks(_in_detail, 2, options)
