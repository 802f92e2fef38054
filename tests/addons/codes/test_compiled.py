"""Codecs in compiled loops have the bits of those in operations of torch: any values, any lengths, and in training."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ddp_crossover as dx
from coded_runs import ADAM, SGD, Coded, Training
from ddp_crossover.addons.codes import choice, wire
from ddp_crossover.addons.codes.block_int8 import BLOCK_NUMEL, BlockInt8
from ddp_crossover.addons.codes.cast import Cast
from ddp_crossover.addons.codes.choice import fastest
from ddp_crossover.addons.codes.codec import CHUNK_NUMEL, Codec
from ddp_crossover.addons.codes.top_k import Selector, TopKCodec
from ddp_crossover.addons.codes.wire import CodedWire, wire_of

numba = pytest.importorskip("numba", reason="the extra `fast` is not installed")
kernels = pytest.importorskip("ddp_crossover.addons.codes.kernels")

OnRanks = Callable[..., list[Any]]
SELECTORS = (Selector.EXACT, Selector.CHUNKED)
TINY, LARGEST = 2.0**-126, torch.finfo(torch.float32).max
# Also what underflows, halves between two codes, ties, and what is not finite.
VALUES = st.lists(
    st.one_of(
        st.floats(width=32),
        st.floats(-1, 1, width=32),
        st.sampled_from([0.0, -0.0, 1e-45, -1e-45, TINY, 126 * TINY, 127 * TINY, -127.0, 0.5, 1.5, LARGEST, -LARGEST]),
        st.sampled_from([torch.inf, -torch.inf, torch.nan, -torch.nan]),
    ),
    min_size=1,
    max_size=4 * BLOCK_NUMEL,
)


def bits(tensor: Tensor) -> Tensor:
    """Of all elements; which NaN it is depends on the order of operands, which compilers choose."""
    if tensor.dtype is torch.float32:
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.reshape(-1).view(torch.uint8)


def results(codec: Codec, values: Tensor, residual: Tensor) -> dict[str, Tensor]:
    """What all operations of a codec write, with an element of NaN on each side of every slice."""
    numel = values.numel()
    payload_bytes = codec.payload_bytes(numel)

    def memory(like: Tensor | None = None) -> Tensor:
        whole = torch.full((numel + 2,), torch.nan)
        if like is not None:
            whole[1:-1] = like
        return whole

    made = {name: memory() for name in ("left out", "decoded", "left out of the sum")}
    made |= {"total": memory(values), "sum": memory(residual), "values": memory(values), "residual": memory(residual)}
    inside = {name: whole[1:-1] for name, whole in made.items()}  # not aligned to vectors
    payloads = torch.zeros(2, 4 + (payload_bytes + 3) // 4 * 4 + 4, dtype=torch.uint8)  # floats begin at words
    payload, of_sum = payloads[:, 4 : 4 + payload_bytes]
    codec.encode(inside["values"], inside["residual"], inside["left out"], payload)
    codec.decode(payload, inside["decoded"])
    codec.add(payload, inside["total"])
    codec.encode_sum(inside["sum"], inside["left out of the sum"], of_sum)
    finite = torch.stack([codec.is_finite(payload), codec.is_finite(of_sum)])
    return made | {"payloads": payloads, "finite": finite}


def assert_same_bits(codec: type[Codec], arguments: tuple[Any, ...], values: Tensor, residual: Tensor) -> None:
    compiled = fastest(codec, on_host=True)
    assert compiled is not codec
    expected, got = (results(kind(*arguments), values, residual) for kind in (codec, compiled))
    for name in expected:
        assert torch.equal(bits(got[name]), bits(expected[name])), name


def heavy_tailed(numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).mul(1.5).exp()


def some_of_each(numel: int) -> list[Tensor]:
    """Gradients; those with ties and zeros of both signs; equal ones; some that are not finite."""
    values = heavy_tailed(numel)
    ties = values.bfloat16().float()
    ties[::3], ties[1::5] = 0.0, -0.0
    bad = values.clone()
    bad[5::4099], bad[7::5003], bad[-1:] = torch.inf, -torch.nan, torch.nan
    return [values, ties, torch.full((numel,), -0.1), torch.zeros(numel), bad]


@pytest.mark.quick
@settings(max_examples=300, deadline=None)
@given(values=VALUES, exponent=st.sampled_from([-140, -100, -20, 0]), seed=st.integers(0, 99))
def test_int8_of_any_values(values: list[float], exponent: int, seed: int) -> None:
    tensor = torch.tensor(values) * 2.0**exponent
    tensor = torch.nn.functional.pad(tensor, (0, -tensor.numel() % BLOCK_NUMEL))
    residual = heavy_tailed(tensor.numel(), seed) * 2.0**exponent * (seed % 3)
    assert_same_bits(BlockInt8, (), tensor, residual)


@pytest.mark.parametrize(
    "numel", (0, *(blocks * BLOCK_NUMEL for blocks in (1, 2, 3, 5, 64, 65)), CHUNK_NUMEL - 64, CHUNK_NUMEL + 64)
)
def test_int8_of_any_length(numel: int) -> None:
    for values in some_of_each(numel):
        assert_same_bits(BlockInt8, (), values, heavy_tailed(numel, 1) * 0.1)


@pytest.mark.quick
@pytest.mark.parametrize("selector", SELECTORS)
@settings(max_examples=200, deadline=None)
@given(values=VALUES, density=st.floats(1e-3, 1), seed=st.integers(0, 99))
def test_the_largest_of_any_values(selector: Selector, values: list[float], density: float, seed: int) -> None:
    tensor = torch.tensor(values)
    residual = heavy_tailed(tensor.numel(), seed) * (seed % 3)
    assert_same_bits(TopKCodec, (density, selector), tensor, residual)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("numel", (0, 1, 31, 32, 33, 4095, 4096, 4097, 4096 + 31, 3 * 4096 + 65, 50_000))
def test_the_largest_of_any_length(selector: Selector, numel: int) -> None:
    for values in some_of_each(numel):
        for density in (0.0002, 0.01, 0.04, 0.3, 0.99999, 1.0):
            assert_same_bits(TopKCodec, (density, selector), values, heavy_tailed(numel, 1) * 0.1)


@pytest.mark.parametrize(("codec", "arguments"), [(BlockInt8, ()), (TopKCodec, (0.01, Selector.CHUNKED))])
def test_what_is_left_out_may_take_the_memory_of_the_values(codec: type[Codec], arguments: tuple[Any, ...]) -> None:
    values, residual = heavy_tailed(3 * 4096), heavy_tailed(3 * 4096, 1)
    of_kinds = []
    for kind in (codec, fastest(codec, on_host=True)):
        memory, one = values.clone(), kind(*arguments)
        payload = torch.empty(one.payload_bytes(len(values)), dtype=torch.uint8)
        one.encode(memory, residual, memory, payload)
        of_kinds.append((payload, bits(memory)))
    assert all(map(torch.equal, *of_kinds))


# Training.


def trained(case: Coded) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """The kinds of codecs, the parameters, and what was left out."""
    run = Training(case)
    of_wire = run.state._planning._wire
    assert isinstance(of_wire, CodedWire)
    for step in range(9):
        run.step(step)
    assert run.state.plan is not None and run.state.plan.is_coded
    outcome = run.parameters(), run.left_out()["residual"]
    run.state.detach()
    return [type(codec).__name__ for codec in of_wire._codecs()], *outcome


def with_and_without(case: Coded) -> list[tuple[list[str], dict[str, Tensor], dict[str, Tensor]]]:
    compiled = trained(case)
    with mock.patch.object(wire, "fastest", lambda codec, *, on_host: codec):
        return [compiled, trained(case)]


CASES = {
    "int8": Coded({"wire_dtype": torch.int8}, ADAM),
    "top-k, int8": Coded({"compress": dx.TopK(0.05), "wire_dtype": torch.int8}, SGD),
    "exact top-k, warm-up": Coded({"compress": dx.TopK(0.02, "exact", warmup=[(3, 0.5)])}, ADAM, looks=False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.quick if name == "top-k, int8" else ()) for name in CASES]
)
def test_training_has_the_same_bits_with_and_without_numba(on_ranks: OnRanks, name: str) -> None:
    for compiled, of_torch in on_ranks(with_and_without, 2, CASES[name]):
        assert all(kind.startswith("Compiled") for kind in compiled[0])
        assert not any(kind.startswith("Compiled") for kind in of_torch[0])
        for got, expected in zip(compiled[1:], of_torch[1:], strict=True):
            assert got.keys() == expected.keys() and got
            assert all(torch.equal(bits(got[key]), bits(expected[key])) for key in got)


# Which ones a link gets.


def test_codes_are_compiled_on_the_host_only() -> None:
    for on_host in (True, False):
        coded = wire_of(torch.int8, dx.TopK(0.1), on_host=on_host)
        assert isinstance(coded, CodedWire)
        are_compiled = {type(codec) in choice.compiled().values() for codec in coded._codecs()}
        assert are_compiled == {on_host}
    assert fastest(Cast, on_host=True) is Cast  # what nobody has compiled


def test_a_density_that_changes_stays_compiled() -> None:
    codec = fastest(TopKCodec, on_host=True)(0.5, Selector.CHUNKED)
    assert type(codec.with_density(0.1)) is type(codec)


@pytest.fixture
def chosen_anew() -> Any:
    choice.compiled.cache_clear()
    yield
    choice.compiled.cache_clear()


@pytest.mark.usefixtures("chosen_anew")
def test_without_numba_torch_does_it() -> None:
    with mock.patch.dict(sys.modules, {"numba": None}):  # importing it raises ImportError
        assert fastest(BlockInt8, on_host=True) is BlockInt8


@pytest.mark.usefixtures("chosen_anew")
def test_loops_that_would_not_be_compiled_are_not_used() -> None:
    with mock.patch.object(numba.config, "DISABLE_JIT", 1):
        assert fastest(BlockInt8, on_host=True) is BlockInt8


def test_numba_is_imported_for_codes_only() -> None:
    program = """if True:
        import sys, torch
        import ddp_crossover
        from ddp_crossover.composition import _wire
        from ddp_crossover.options import Options
        _wire(Options(wire_dtype=torch.bfloat16), on_host=True)
        assert "numba" not in sys.modules
        _wire(Options(wire_dtype=torch.int8), on_host=False)
        assert "numba" not in sys.modules
        _wire(Options(wire_dtype=torch.int8), on_host=True)
        assert "numba" in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_each_loop_is_compiled_before_it_runs_and_for_nothing_else_later() -> None:
    loops = [one for one in vars(kernels).values() if hasattr(one, "nopython_signatures") and one.__name__[0] != "_"]
    assert len(loops) == 7
    assert all(one.nopython_signatures and not one._can_compile for one in loops)


INT_TO_INT = numba.types.int64(numba.types.int64)


def test_a_loop_without_a_folder_for_its_cache_is_compiled_each_time() -> None:
    scope: dict[str, Any] = {}
    exec("def doubled(x): return x + x", scope)  # numba finds no folder beside a function without a file
    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(INT_TO_INT, cache=True)(scope["doubled"])
    assert kernels._compiled(INT_TO_INT)(scope["doubled"])(21) == 42


def _tripled(x: Any) -> Any:
    return 3 * x


def test_a_full_disk_costs_time_only(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(numba.config, "CACHE_DIR", str(tmp_path)),
        mock.patch("numba.core.caching.os.replace", side_effect=full) as replace,
    ):
        tripled = kernels._compiled(INT_TO_INT)(_tripled)
    assert replace.called and tripled(14) == 42
