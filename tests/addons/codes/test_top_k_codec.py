"""The largest elements and their indices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_crossover.addons.codes.top_k import Selector, TopKCodec, selected_numel

pytestmark = pytest.mark.quick

SELECTORS = (Selector.EXACT, Selector.CHUNKED)
NUMELS = (1, 7, 4095, 4096, 4097, 3 * 4096, 3 * 4096 + 5)


def encoded(codec: TopKCodec, values: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    payload = torch.empty(codec.payload_bytes(values.numel()), dtype=torch.uint8)
    left_out, decoded = torch.full_like(values, torch.nan), torch.full_like(values, torch.nan)
    codec.encode(values, residual, left_out, payload)
    codec.decode(payload, decoded)
    return payload, decoded, left_out


def gradients(numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()


@pytest.mark.parametrize("selector", SELECTORS)
@settings(max_examples=60, deadline=None)
@given(numel=st.sampled_from(NUMELS), density=st.floats(1e-4, 1), seed=st.integers(0, 99))
def test_each_element_is_sent_or_left_out(selector: Selector, numel: int, density: float, seed: int) -> None:
    codec = TopKCodec(density, selector)
    values, residual = gradients(numel, seed), gradients(numel, seed + 100)
    payload, decoded, left_out = encoded(codec, values, residual)
    total = values + residual
    is_sent = decoded != 0
    assert int(is_sent.sum()) == selected_numel(numel, density, selector)
    assert torch.equal(decoded[is_sent], total[is_sent]) and not left_out[is_sent].any()
    assert torch.equal(left_out[~is_sent], total[~is_sent])
    index_bytes = 2 if selector is Selector.CHUNKED else 4
    assert payload.numel() == (4 + index_bytes) * selected_numel(numel, density, selector)
    state = gradients(numel, 7)
    codec.add(payload, state)
    assert torch.equal(state, gradients(numel, 7) + decoded)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf))
def test_what_is_not_finite_is_sent(selector: Selector, bad: float) -> None:
    values = gradients(9000)
    values[8999] = bad
    codec = TopKCodec(0.001, selector)
    payload, decoded, _ = encoded(codec, values)
    assert not decoded[8999].isfinite() and decoded[:8999].isfinite().all()
    assert not codec.is_finite(payload)
    assert codec.is_finite(encoded(codec, gradients(9000))[0])


def test_indices_beyond_15_bits_and_24_bits() -> None:
    for selector in SELECTORS:
        values = torch.zeros(2**24 + 4097)
        places = [0, 4095, 2**15 + 1, 2**16 + 1, 2**24 + 1, values.numel() - 1]
        values[places] = torch.arange(1.0, 7)
        assert torch.equal(encoded(TopKCodec(0.001, selector), values)[1], values)
