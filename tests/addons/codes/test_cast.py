"""Elements rounded to 16 bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_crossover.addons.codes.cast import Cast
from ddp_crossover.addons.codes.codec import CHUNK_NUMEL

pytestmark = pytest.mark.quick

DTYPES = (torch.bfloat16, torch.float16)


def encoded(dtype: torch.dtype, values: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    codec = Cast(dtype)
    payload = torch.empty(codec.payload_bytes(values.numel()), dtype=torch.uint8)
    left_out, decoded = torch.empty_like(values), torch.empty_like(values)
    codec.encode(values, residual, left_out, payload)
    codec.decode(payload, decoded)
    return payload, decoded, left_out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=100),
    residual=st.lists(st.floats(-1, 1, width=32), min_size=100, max_size=100),
)
def test_what_is_decoded_and_what_is_left_out_are_all(
    dtype: torch.dtype, values: list[float], residual: list[float]
) -> None:
    tensor, rest = torch.tensor(values), torch.tensor(residual[: len(values)])
    _, decoded, left_out = encoded(dtype, tensor, rest)
    total = tensor + rest
    assert torch.equal(decoded, total.to(dtype).float())
    assert torch.equal(decoded.double() + left_out.double(), total.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_and_chunks(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(CHUNK_NUMEL + 77, generator=generator)
    payload, decoded, left_out = encoded(dtype, tensor)
    assert payload.numel() == 2 * tensor.numel()
    assert torch.equal(decoded, tensor.to(dtype).float())
    total = torch.randn(tensor.numel(), generator=generator)
    expected = total + decoded
    Cast(dtype).add(payload, total)
    assert torch.equal(total, expected)
    again = torch.empty_like(payload)
    Cast(dtype).encode(tensor, None, tensor, again)
    assert torch.equal(again, payload) and torch.equal(tensor, left_out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf, 3.4e38))
def test_what_is_not_finite_is_seen(dtype: torch.dtype, bad: float) -> None:
    payload, decoded, _ = encoded(dtype, torch.tensor([1.0, bad, 2.0]))
    assert not decoded[1].isfinite() and decoded[::2].tolist() == [1, 2]
    assert not Cast(dtype).is_finite(payload)
    # The sum of these overflows, and they do not.
    large = torch.full((1000,), float(torch.finfo(dtype).max))
    assert Cast(dtype).is_finite(encoded(dtype, large)[0])
