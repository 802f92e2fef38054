"""The largest entries of a slice are found: those of `wire_reference.largest_of`, as many as announced."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_crossover.addons.codes import top_k
from ddp_crossover.addons.codes.top_k import CHUNK_NUMEL, Selector, TopKCodec, select, selected_numel
from ddp_crossover.addons.codes.wire import CodedWire, wire_of
from ddp_crossover.top_k import TopK
from wire_reference import largest_of

pytestmark = pytest.mark.quick

CONCRETE = (Selector.EXACT, Selector.CHUNKED)
SIZES = (0, 1, 2, 4095, 4096, 4097, 3 * 4096 + 7, 50_000)
DENSITIES = (1e-9, 0.0002, 0.01, 0.3, 0.5, 0.9, 0.99999, 1.0)


def _heavy_tailed(numel: int) -> Tensor:
    """As gradients are: most entries are small, and a few hold most of the energy."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.randn(numel, generator=generator).mul(1.5).exp()
    return torch.randn(numel, generator=generator) * scales


def _select(values: Tensor, density: float, selector: Selector) -> Tensor:
    """What is selected, after the checks that hold for all values."""
    before = values.clone()
    indices = select(values, density, selector)
    assert indices.dtype is torch.int64
    assert indices.tolist() == sorted(set(indices.tolist())), "not ascending, or not unique"
    assert indices.numel() == selected_numel(values.numel(), density, selector)
    if indices.numel():
        assert int(indices[0]) >= 0 and int(indices[-1]) < values.numel()
    torch.testing.assert_close(values, before, rtol=0, atol=0, equal_nan=True)
    return indices


def _by_definition(values: Tensor, density: float, selector: Selector) -> list[int]:
    """Of equal magnitudes the first; chunks compare to one part in 2048."""
    return largest_of(values, density, str(selector)).nonzero().view(-1).tolist()


@pytest.mark.parametrize("selector", CONCRETE)
@given(numel=st.integers(0, 20_000), density=st.floats(0, 1))
def test_the_announced_number_is_between_one_and_all(selector: Selector, numel: int, density: float) -> None:
    k = selected_numel(numel, density, selector)
    assert min(numel, 1 if density else 0) <= k <= numel
    chunks = -(-numel // CHUNK_NUMEL) if selector is Selector.CHUNKED else 1
    assert k >= (chunks if numel and density else 0)
    assert abs(k - density * numel) <= chunks  # by at most a half each, or by 1 where that would be none


# Few different values, so that there are ties; zeros of both signs, denormals and values at the ends of the range.
VALUES = st.lists(
    st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-45, 3e38, -3e38]), st.floats(width=32)),
    min_size=1,
    max_size=200,
)


@pytest.mark.parametrize("selector", CONCRETE)
@settings(max_examples=200, deadline=None)
@given(values=VALUES, density=st.floats(1e-3, 1))
def test_any_values(selector: Selector, values: list[float], density: float) -> None:
    tensor = torch.tensor(values)
    indices = _select(tensor, density, selector)
    if not tensor.isfinite().all():
        assert not tensor[indices].isfinite().all(), "what is not finite did not travel"
    if not tensor.isnan().any():
        assert indices.tolist() == _by_definition(tensor, density, selector)


@pytest.mark.parametrize("selector", CONCRETE)
@pytest.mark.parametrize("numel", SIZES)
def test_the_largest_are_selected(numel: int, selector: Selector) -> None:
    values = _heavy_tailed(numel)
    # Half-precision gradients have many equal magnitudes.
    for same in (values, values.bfloat16().float(), torch.full_like(values, -0.1), torch.zeros_like(values)):
        same[1::2] *= -1
        assert _select(same, 0.0, selector).numel() == 0
        for density in DENSITIES if numel else ():
            assert _select(same, density, selector).tolist() == _by_definition(same, density, selector)


@pytest.mark.parametrize("bad", (float("nan"), -float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("selector", CONCRETE)
def test_what_is_not_finite_travels(selector: Selector, bad: float) -> None:
    for numel, places in ((1, [0]), (4097, [4096]), (10_000, [0, 5000]), (10_000, list(range(0, 10_000, 3)))):
        values = _heavy_tailed(numel)
        values[places] = bad
        sent = values[_select(values, 0.001, selector)]
        assert not sent.isfinite().all()
        if len(places) > 100:
            assert not sent.isfinite().any()


def test_nan_goes_before_infinity() -> None:
    values = torch.full((5000,), float("inf"))
    values[4321] = -float("nan")
    assert _select(values, 1 / 5000, Selector.EXACT).tolist() == [4321]


def test_other_devices_select_the_same_without_bins() -> None:
    # The path of CUDA tensors, on the CPU.
    for values in (_heavy_tailed(20_000), _heavy_tailed(20_000).bfloat16().float(), torch.zeros(20_000)):
        bits = top_k._magnitude_bits(values)
        threshold = bits.topk(200, sorted=False).values.amin()
        assert top_k._pick(bits, 200, threshold).tolist() == _by_definition(values, 0.01, Selector.EXACT)


@pytest.mark.parametrize(("on_host", "selector"), [(True, Selector.CHUNKED), (False, Selector.EXACT)])
def test_auto_is_chunked_on_cpu_and_exact_on_gpus(on_host: bool, selector: Selector) -> None:
    wire = wire_of(None, TopK(0.01), on_host=on_host)
    assert isinstance(wire, CodedWire)
    scatter = wire.scatter
    assert scatter is not None
    assert scatter.payload_bytes(10_000) == TopKCodec(0.01, selector).payload_bytes(10_000)
