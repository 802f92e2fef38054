"""A shard has a version of its own: autograd must not take what legs write beside it for a change of the shard."""

from __future__ import annotations

import pytest
import torch

from ddp_crossover.addons.shards.own_shards import shard_to_update
from ddp_crossover.addons.shards.ownership import ParameterRange

pytestmark = pytest.mark.quick


def test_an_update_may_differentiate_a_shard_while_legs_write_to_others() -> None:
    values, gradients = torch.ones(4), torch.ones(4)
    memory = shard_to_update(ParameterRange(0, 0, 2), values[:2], gradients[:2], requires_grad=True).memory
    assert memory.grad is not None
    of_penalty = (memory * memory.grad).square().sum()
    values[2:] = gradients[2:] = 5  # as from another thread
    assert torch.autograd.grad(of_penalty, memory)[0].tolist() == [2, 2]
    with torch.no_grad():
        memory.add_(1)
    assert values.tolist() == [2, 2, 5, 5]
