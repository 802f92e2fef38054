"""Blocks of 64 elements as 8-bit integers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_crossover.codecs.block_int8 import BLOCK_NUMEL, BlockInt8
from ddp_crossover.codecs.codec import CHUNK_NUMEL

pytestmark = pytest.mark.quick

CODEC = BlockInt8()
TINY = 2.0**-126  # the smallest normal fp32 and bfloat16


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


def scales_of(values: Tensor) -> Tensor:
    """By the definition, one block after another, in fp64."""
    scales = []
    for block in values.view(-1, BLOCK_NUMEL):
        exact = float(block.abs().max() / 127)  # the quotient is rounded to fp32
        if exact == 0 or not math.isfinite(exact):
            scales.append(exact)
            continue
        unit = 2.0 ** (max(math.frexp(exact)[1] - 1, -126) - 7)  # of the last of 8 bits
        rounded = math.ceil(exact / unit) * unit
        scales.append(rounded if rounded >= TINY else 0.0)
    return torch.tensor(scales, dtype=torch.float64).repeat_interleave(BLOCK_NUMEL)


BLOCKS = st.lists(
    st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127),
        st.floats(-1, 1, width=32),
        st.sampled_from([0.0, -0.0, 1e-45, -1e-45, TINY, 127 * TINY, -1.0, 127.0, 0.5, 1.5, 3e38, -3e38]),
    ),
    min_size=1,
    max_size=3 * BLOCK_NUMEL,
)


def in_blocks(values: list[float]) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float32)
    return torch.nn.functional.pad(tensor, (0, -tensor.numel() % BLOCK_NUMEL))


@settings(max_examples=300, deadline=None)
@given(values=BLOCKS, exponent=st.integers(-60, 0))
def test_what_is_decoded_and_what_is_left_out_are_all(values: list[float], exponent: int) -> None:
    tensor = in_blocks(values) * 2.0**exponent
    _, decoded, left_out = encoded(tensor)
    assert decoded.isfinite().all()
    # In fp64, in which the sum of two fp32 of about the same magnitude is exact.
    assert torch.equal(decoded.double() + left_out.double(), tensor.double())
    scales = scales_of(tensor)
    # The quotient that is rounded is itself off by half a unit of fp32.
    assert (left_out.double().abs() <= scales * (0.5 + 2.0**-17))[scales > 0].all()
    assert (decoded[scales == 0] == 0).all()
    assert torch.equal(decoded.double(), (decoded.double() / scales).nan_to_num().round() * scales)


@settings(max_examples=100, deadline=None)
@given(values=BLOCKS, seed=st.integers(0, 2**16))
def test_the_residual_is_added_first(values: list[float], seed: int) -> None:
    tensor = in_blocks(values).clamp(-1e38, 1e38)
    residual = torch.randn(tensor.numel(), generator=torch.Generator().manual_seed(seed)) * tensor.abs().mean()
    residual = residual.nan_to_num().clamp(-1e38, 1e38)
    together, apart = encoded(tensor, residual), encoded(tensor + residual)
    assert all(map(torch.equal, together, apart))
    assert torch.equal(together[1].double() + together[2].double(), (tensor + residual).double())


@settings(max_examples=100, deadline=None)
@given(codes=st.lists(st.integers(-127, 127), min_size=1, max_size=200), exponent=st.integers(-126, 120))
def test_multiples_of_a_power_of_two_are_exact(codes: list[int], exponent: int) -> None:
    tensor = in_blocks([float(code) for code in codes])
    tensor[::BLOCK_NUMEL] = 127
    tensor *= 2.0**exponent
    _, decoded, left_out = encoded(tensor)
    assert torch.equal(decoded, tensor)
    assert (left_out == 0).all()


def test_halves_go_to_the_even_code() -> None:
    tensor = in_blocks([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5])
    assert encoded(tensor)[1][:7].tolist() == [127, 0, 2, 2, 0, -2, 126]


def test_scales_are_rounded_up() -> None:
    # Else the largest element would need a code above 127, and int8 would wrap around.
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(5000 * BLOCK_NUMEL, generator=generator)
    payload, decoded, _ = encoded(tensor)
    codes, scales = payload[: tensor.numel()].view(torch.int8), payload[tensor.numel() :].view(torch.bfloat16)
    assert int(codes.min()) >= -127 and int(codes.max()) == 127
    assert torch.equal(scales.double().repeat_interleave(BLOCK_NUMEL), scales_of(tensor))
    assert (decoded.sign() * tensor.sign() >= 0).all()


def test_zeros_and_what_underflows() -> None:
    for values in ([0.0], [-0.0] * 64, [1e-45] * 64, [-TINY] * 64, [126 * TINY] * 64):
        tensor = in_blocks(values)
        payload, decoded, left_out = encoded(tensor)
        assert not payload[len(tensor) :].any()  # the scales
        assert not decoded.any()
        assert torch.equal(left_out, tensor)
    assert encoded(in_blocks([127 * TINY]))[1].any()


def test_largest_numbers() -> None:
    largest = torch.finfo(torch.float32).max
    for top in (3e38, 3.38e38, 3.395e38, 3.4e38, largest, -largest):
        payload, decoded, left_out = encoded(in_blocks([top, 1.0, 2e38]))
        assert CODEC.is_finite(payload)
        assert decoded.isfinite().all() and left_out.isfinite().all()  # 127 scales do not overflow


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
    assert CODEC.is_finite(encoded(torch.ones(128))[0])


@given(blocks=st.integers(0, 10_000))
def test_payloads_have_66_bytes_a_block(blocks: int) -> None:
    assert CODEC.payload_bytes(blocks * 64) == blocks * 66


@pytest.mark.parametrize("numel", (0, 64, CHUNK_NUMEL - 64, CHUNK_NUMEL, CHUNK_NUMEL + 64, 2 * CHUNK_NUMEL + 128))
def test_chunks_do_not_show(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    tensor = torch.randn(numel, generator=generator)
    payload, decoded, left_out = encoded(tensor)
    for low in range(0, numel, 64 * 100):
        part = slice(low, low + 64 * 100)
        assert torch.equal(encoded(tensor[part].clone())[1], decoded[part])
    total = torch.randn(numel, generator=generator)
    expected = total + decoded
    CODEC.add(payload, total)
    assert torch.equal(total, expected)
    assert torch.equal(decoded.double() + left_out.double(), tensor.double())


def test_may_work_in_the_memory_of_the_values() -> None:
    tensor = torch.randn(2 * CHUNK_NUMEL + 64, generator=torch.Generator().manual_seed(3))
    payload, _, left_out = encoded(tensor)
    again = torch.empty_like(payload)
    CODEC.encode(tensor, None, tensor, again)
    assert torch.equal(again, payload) and torch.equal(tensor, left_out)
