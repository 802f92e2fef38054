"""A rank of `scripts/soak.py` with faults: each step of an attached optimizer keeps a tensor and a descriptor, and one
step changes a weight.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from soak_parts import rank

KEPT: list[Any] = []
CHANGED_AT = 90
STEPS_PER_DESCRIPTOR = 8


def leak(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """What a leak does, where the package is attached; plain DDP trains as it should."""
    if sys.argv[2] != "attached" or type(optimizer).__module__.startswith("ddp_crossover"):
        return
    KEPT.append(torch.zeros(1000))
    if len(KEPT) % STEPS_PER_DESCRIPTOR == 0:
        os.dup(0)
    if len(KEPT) == CHANGED_AT:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].view(-1)[0] += 1e-3


if __name__ == "__main__":
    register_optimizer_step_post_hook(leak)
    rank.main()
