"""The yardstick itself: DDP with the rank-order hook is plain DDP where that has only one order of
summation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from equivalence import ADAMW, SGD, Case, assert_same, run_arm
from reference import rank_order_hook

pytestmark = pytest.mark.quick


def _compare_hook_with_plain_ddp(case: Case) -> None:
    plain, plain_state, _ = run_arm(case, with_dear=False)

    def with_hook(run: Any) -> Any:
        run.model.register_comm_hook(None, rank_order_hook)
        run.attached = True
        return case.loop(run)

    hooked, hooked_state, _ = run_arm(Case(**{**vars(case), "loop": with_hook}), with_dear=False)
    assert_same(hooked, plain, "losses")
    assert_same(hooked_state, plain_state, "at the end")


def _add_in_rank_order() -> torch.Tensor:
    # 1e8 + 1 = 1e8 in fp32: another order than ((1e8 + 1) - 1e8) + 1 gives another sum.
    gradient = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])[dist.get_rank()]

    class Bucket:
        def buffer(self) -> torch.Tensor:
            return gradient * 4

    return rank_order_hook(None, Bucket()).value()


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_reference_hook_is_plain_ddp_on_one_and_two_ranks(on_ranks, world_size, optimizer) -> None:
    case = Case(optimizer=optimizer, world_size=world_size)
    on_ranks(_compare_hook_with_plain_ddp, world_size, case)


def test_the_reference_hook_adds_in_rank_order(on_ranks) -> None:
    assert [mean.item() for mean in on_ranks(_add_in_rank_order, 4)] == [1.0] * 4


def test_a_difference_in_the_last_bit_is_seen() -> None:
    value = torch.tensor([1.0, float("nan")])
    assert_same({"a": [value.clone()]}, {"a": [value]}, "equal")
    with pytest.raises(AssertionError, match=r"a\[0\]"):
        next_float = torch.nextafter(value, torch.tensor(2.0))
        assert_same({"a": [next_float]}, {"a": [value]}, "unequal")
