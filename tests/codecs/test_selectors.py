"""The largest entries of a slice are found: as many as announced, each once, the same ones again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_crossover.codecs import top_k
from ddp_crossover.codecs.top_k import CHUNK_NUMEL, Selector, select, selected_numel

CONCRETE = (Selector.EXACT, Selector.CHUNKED)
EDGES = (0, 1, 2, 4095, 4096, 4097, 3 * 4096 + 7)
DTYPES = (torch.float32, torch.float64)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _heavy_tailed(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """As gradients are: most entries are small, and a few hold most of the energy."""
    generator = _generator(seed)
    scales = torch.randn(numel, generator=generator, dtype=dtype).mul(1.5).exp()
    return torch.randn(numel, generator=generator, dtype=dtype) * scales


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


def _by_sorting(values: Tensor, k: int) -> Tensor:
    """The ``k`` largest in magnitude, of equal ones the first."""
    order = torch.sort(values.abs(), descending=True, stable=True).indices
    return order[:k].sort().values


def _energy(values: Tensor, indices: Tensor) -> float:
    return float(values[indices].double().square().sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("selector", CONCRETE)
@pytest.mark.parametrize("numel", EDGES)
def test_selects_as_many_different_entries_as_announced(numel: int, selector: Selector, dtype: torch.dtype) -> None:
    for density in (0.0, 1e-9, 0.001, 0.01, 0.3, 0.5, 0.9, 0.99999, 1.0):
        _select(_heavy_tailed(numel, dtype=dtype), density, selector)


@pytest.mark.parametrize("selector", CONCRETE)
@given(numel=st.integers(0, 20_000), density=st.floats(0, 1))
def test_the_announced_number_is_between_one_and_all(selector: Selector, numel: int, density: float) -> None:
    k = selected_numel(numel, density, selector)
    assert min(numel, 1 if density else 0) <= k <= numel
    chunks = -(-numel // CHUNK_NUMEL) if selector is Selector.CHUNKED else 1
    assert k >= (chunks if numel and density else 0)
    assert abs(k - density * numel) <= chunks  # by at most a half each, or by 1 where that would be none


def test_small_chunks_send_at_least_one_entry() -> None:
    assert selected_numel(2 * 4096 + 5, 1e-9, Selector.CHUNKED) == 3
    assert selected_numel(4096 + 100, 0.01, Selector.CHUNKED) == 41 + 1
    assert selected_numel(4096, 1e-9, Selector.EXACT) == 1


@pytest.mark.parametrize("selector", CONCRETE)
@pytest.mark.parametrize("numel", EDGES)
def test_density_1_selects_everything(numel: int, selector: Selector) -> None:
    assert _select(_heavy_tailed(numel), 1.0, selector).tolist() == list(range(numel))


# Few different values, so that there are ties; zeros of both signs, denormals and values at the ends of the range.
VALUES = st.lists(
    st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-45, 3e38, -3e38]), st.floats(width=32)),
    min_size=1,
    max_size=200,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("selector", CONCRETE)
@settings(max_examples=150, deadline=None)
@given(values=VALUES, density=st.floats(0, 1))
def test_any_values(selector: Selector, dtype: torch.dtype, values: list[float], density: float) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    indices = _select(tensor, density, selector)
    if indices.numel() and not tensor.isfinite().all():
        assert not tensor[indices].isfinite().all(), "what is not finite did not travel"
    if selector is Selector.EXACT and not tensor.isnan().any():
        assert indices.tolist() == _by_sorting(tensor, indices.numel()).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("density", (0.0002, 0.01, 0.2, 0.7))
def test_exact_selects_the_largest(density: float, dtype: torch.dtype) -> None:
    values = _heavy_tailed(50_000, dtype=dtype)
    # Half-precision gradients have many equal magnitudes.
    for same in (values, values.bfloat16().to(dtype)):
        indices = _select(same, density, Selector.EXACT)
        assert indices.tolist() == _by_sorting(same, indices.numel()).tolist()


@pytest.mark.parametrize("numel", (4096, 4097, 5 * 4096, 5 * 4096 + 1000))
def test_chunked_selects_the_largest_of_each_chunk(numel: int) -> None:
    values = _heavy_tailed(numel)
    values = values.bfloat16().float()  # magnitudes differ by more than the comparison's precision, or not at all
    expected: list[int] = []
    for begin in range(0, numel, CHUNK_NUMEL):
        chunk = values[begin : begin + CHUNK_NUMEL]
        k = selected_numel(chunk.numel(), 0.01, Selector.EXACT)
        expected += (_by_sorting(chunk, k) + begin).tolist()
    assert _select(values, 0.01, Selector.CHUNKED).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunked_compares_magnitudes_to_one_part_in_2048(dtype: torch.dtype) -> None:
    values = _heavy_tailed(4096, dtype=dtype).abs()
    chosen = torch.zeros(4096, dtype=torch.bool)
    chosen[_select(values, 0.1, Selector.CHUNKED)] = True
    assert float(values[chosen].min()) * (1 + 1 / 2048) > float(values[~chosen].max())


@pytest.mark.parametrize("density", (0.001, 0.01, 0.1, 0.5))
def test_energy_is_close_to_that_of_the_largest(density: float) -> None:
    for seed in range(3):
        values = _heavy_tailed(200_000, seed)
        exact = _energy(values, _select(values, density, Selector.EXACT))
        # Chunks of 4096 send 4 entries each at density 0.001, however many of the largest they have.
        at_least = 0.93 if density < 0.01 else 0.99
        assert _energy(values, _select(values, density, Selector.CHUNKED)) >= at_least * exact


@pytest.mark.parametrize("value", (0.0, -0.0, 1.0, -0.1, 1e-45, 3e38))
@pytest.mark.parametrize("numel", (1, 4095, 4097, 10_000))
def test_equal_magnitudes(numel: int, value: float) -> None:
    values = torch.full((numel,), value)
    values[1::2] *= -1
    k = selected_numel(numel, 0.01, Selector.EXACT)
    assert _select(values, 0.01, Selector.EXACT).tolist() == list(range(k))
    first_of_chunks = [
        begin + place
        for begin in range(0, numel, CHUNK_NUMEL)
        for place in range(selected_numel(min(CHUNK_NUMEL, numel - begin), 0.01, Selector.EXACT))
    ]
    assert _select(values, 0.01, Selector.CHUNKED).tolist() == first_of_chunks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", (float("nan"), -float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("selector", CONCRETE)
def test_what_is_not_finite_travels(selector: Selector, bad: float, dtype: torch.dtype) -> None:
    for numel, places in ((1, [0]), (4097, [4096]), (10_000, [0, 5000]), (10_000, list(range(0, 10_000, 3)))):
        values = _heavy_tailed(numel, dtype=dtype)
        values[places] = bad
        sent = values[_select(values, 0.001, selector)]
        assert not sent.isfinite().all()
        if len(places) > 100:
            assert not sent.isfinite().any()


def test_nan_goes_before_infinity() -> None:
    values = torch.full((5000,), float("inf"))
    values[4321] = -float("nan")
    assert _select(values, 1 / 5000, Selector.EXACT).tolist() == [4321]


def test_indices_beyond_what_fp32_counts() -> None:
    numel = 2**24 + 4099
    values = torch.zeros(numel)
    odd = [1, 2**24 - 1, 2**24 + 1, 2**24 + 3, numel - 1]  # fp32 has no 2**24 + 1
    values[odd] = torch.tensor([1.0, -5.0, 2.0, -3.0, 4.0])
    assert select(values, len(odd) / numel, Selector.EXACT).tolist() == odd


def test_other_devices_select_the_same_without_bins() -> None:
    # The path of CUDA tensors, on the CPU.
    for values in (_heavy_tailed(20_000), _heavy_tailed(20_000).bfloat16().float(), torch.zeros(20_000)):
        bits = top_k._magnitude_bits(values)
        threshold = bits.topk(200, sorted=False).values.amin()
        assert top_k._pick(bits, 200, threshold).tolist() == _by_sorting(values, 200).tolist()


def test_auto_is_chunked_on_cpu_and_exact_on_gpus() -> None:
    assert Selector.AUTO.on("cpu") is Selector.CHUNKED
    assert Selector.AUTO.on("cuda") is Selector.EXACT


def test_refusals_name_the_parameter() -> None:
    with pytest.raises(ValueError, match="density must be between 0 and 1"):
        selected_numel(10, 1.5, Selector.EXACT)
    with pytest.raises(ValueError, match="density must be between 0 and 1"):
        select(torch.ones(3), float("nan"), Selector.EXACT)
    with pytest.raises(ValueError, match=r"selector\.on\(device_type\)"):
        select(torch.ones(3), 0.5, Selector.AUTO)
