"""Receive memory that is used again: larger tensors serve smaller requests, and none are piled up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_crossover.comm.sums import ScratchPool

SIZES = st.integers(0, 20)

pytestmark = pytest.mark.quick


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def free_tensors(pool: ScratchPool) -> list[torch.Tensor]:
    return [tensor for tensors in pool._free.values() for tensor in tensors]


def test_a_smaller_request_reuses_a_larger_tensor_which_stays_whole() -> None:
    pool = ScratchPool()
    large = pool.allocate(100, torch.float32)
    pool.free([large])
    small = pool.allocate(7, torch.float32)
    assert small.numel() == 7 and memory(small) == memory(large)
    pool.free([small])
    assert [tensor.numel() for tensor in free_tensors(pool)] == [100]


def test_memory_of_one_dtype_is_not_given_out_as_another() -> None:
    pool = ScratchPool()
    pool.free([pool.allocate(10, torch.float32)])
    assert pool.allocate(5, torch.bfloat16).dtype == torch.bfloat16


@given(st.lists(st.one_of(SIZES.map(lambda n: ("take", n)), SIZES.map(lambda n: ("give back", n)))))
def test_there_are_never_more_tensors_than_were_in_use_at_once(events) -> None:
    pool = ScratchPool()
    taken: list[torch.Tensor] = []
    most = 0
    for event, number in events:
        if event == "take":
            taken.append(pool.allocate(number, torch.float32))
            assert taken[-1].shape == (number,)
        elif taken:
            pool.free([taken.pop(number % len(taken))])
        most = max(most, len(taken))
        everywhere = [*taken, *free_tensors(pool)]
        assert len(everywhere) <= most
        used = [memory(tensor) for tensor in everywhere if tensor.untyped_storage().nbytes()]
        assert len(used) == len(set(used))
