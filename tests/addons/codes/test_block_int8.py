"""Blocks of 64 elements as 8-bit integers: `wire_reference.int8_code`, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_crossover.addons.codes.block_int8 import BLOCK_NUMEL, BlockInt8
from ddp_crossover.addons.codes.codec import CHUNK_NUMEL
from wire_reference import int8_code

pytestmark = pytest.mark.quick

CODEC = BlockInt8()
TINY = 2.0**-126  # the smallest normal fp32 and bfloat16
LARGEST = torch.finfo(torch.float32).max


def encoded(values: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The payload, what it stands for, and what it leaves out."""
    before = values.clone(), None if residual is None else residual.clone()
    payload = torch.empty(CODEC.payload_bytes(values.numel()), dtype=torch.uint8)
    left_out = torch.full_like(values, torch.nan)
    CODEC.encode(values, residual, left_out, payload)
    assert torch.equal(values.view(torch.int32), before[0].view(torch.int32)), "encode() changed its input"
    if residual is not None:
        assert torch.equal(residual.view(torch.int32), before[1].view(torch.int32))
    decoded = torch.full_like(values, torch.nan)
    CODEC.decode(payload, decoded)
    return payload, decoded, left_out


# What underflows, blocks whose scale just does not, halves between two codes, and what nearly overflows.
BLOCKS = st.lists(
    st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.floats(-1, 1, width=32),
        st.sampled_from([0.0, -0.0, 1e-45, TINY, 126 * TINY, 127 * TINY, 127.0, 0.5, 1.5, 3.395e38, LARGEST, -LARGEST]),
    ),
    min_size=1,
    max_size=3 * BLOCK_NUMEL,
)


def in_blocks(values: list[float]) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float32)
    return torch.nn.functional.pad(tensor, (0, -tensor.numel() % BLOCK_NUMEL))


@settings(max_examples=400, deadline=None)
@given(values=BLOCKS, exponent=st.integers(-60, 0))
def test_what_is_decoded_and_what_is_left_out_are_all(values: list[float], exponent: int) -> None:
    tensor = in_blocks(values) * 2.0**exponent
    payload, decoded, left_out = encoded(tensor)
    assert CODEC.is_finite(payload) and decoded.isfinite().all()
    assert torch.equal(decoded, int8_code(tensor))
    # In fp64, in which the sum of two fp32 of about the same magnitude is exact.
    assert torch.equal(decoded.double() + left_out.double(), tensor.double())


@settings(max_examples=100, deadline=None)
@given(values=BLOCKS, seed=st.integers(0, 2**16))
def test_the_residual_is_added_first(values: list[float], seed: int) -> None:
    tensor = in_blocks(values).clamp(-1e38, 1e38)
    residual = torch.randn(tensor.numel(), generator=torch.Generator().manual_seed(seed)) * tensor.abs().mean()
    residual = residual.nan_to_num().clamp(-1e38, 1e38)
    assert all(map(torch.equal, encoded(tensor, residual), encoded(tensor + residual)))


def test_halves_go_to_the_even_code_and_scales_are_rounded_up() -> None:
    assert encoded(in_blocks([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]))[1][:7].tolist() == [127, 0, 2, 2, 0, -2, 126]
    # Else the largest element would need a code above 127, and int8 would wrap around.
    tensor = torch.randn(5000 * BLOCK_NUMEL, generator=torch.Generator().manual_seed(1))
    payload, _, left_out = encoded(tensor)
    codes, scales = payload[: tensor.numel()].view(torch.int8), payload[tensor.numel() :].view(torch.bfloat16)
    assert int(codes.min()) >= -127 and int(codes.max()) == 127
    exact = tensor.view(-1, BLOCK_NUMEL).abs().amax(1) / 127
    assert (exact <= scales.float()).all() and (scales.float() <= exact * (1 + 2.0**-7)).all()
    # The quotient that is rounded is itself off by half a unit of fp32.
    assert (left_out.view(-1, BLOCK_NUMEL).abs().amax(1) <= scales.float() * (0.5 + 2.0**-17)).all()


@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf))
def test_what_is_not_finite_spoils_its_block_only(bad: float) -> None:
    tensor = torch.full((3 * BLOCK_NUMEL,), 127.0)
    tensor[70] = bad
    payload, decoded, _ = encoded(tensor)
    assert decoded[64:128].isnan().all()
    assert torch.equal(decoded[:64], tensor[:64]) and torch.equal(decoded[128:], tensor[128:])
    assert not CODEC.is_finite(payload)
    total = torch.zeros_like(tensor)
    CODEC.add(payload, total)
    assert total[64:128].isnan().all() and (total[:64] == 127).all()


@pytest.mark.parametrize("numel", (0, 64, CHUNK_NUMEL - 64, CHUNK_NUMEL, CHUNK_NUMEL + 64, 2 * CHUNK_NUMEL + 128))
def test_chunks_do_not_show(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    tensor = torch.randn(numel, generator=generator)
    payload, decoded, left_out = encoded(tensor)
    assert torch.equal(decoded, int8_code(tensor))
    total = torch.randn(numel, generator=generator)
    expected = total + decoded
    CODEC.add(payload, total)
    assert torch.equal(total, expected)
    assert torch.equal(decoded.double() + left_out.double(), tensor.double())
    # It may work in the memory of the values.
    again = torch.empty_like(payload)
    CODEC.encode(tensor, None, tensor, again)
    assert torch.equal(again, payload) and torch.equal(tensor, left_out)
