"""Samples as bytes: what comes back is what was stored, bit for bit and type for type, or storing is refused."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from PIL import Image

from ddp_crossover.addons.data.sample_codec import NotStorable, decode, encode

Point = collections.namedtuple("Point", "x y")
TENSOR_DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Equal in type, shape and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(*(value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other)))
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, Image.Image):
        return (one.mode, one.size, one.tobytes()) == (other.mode, other.size, other.tobytes())
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return repr(one) == repr(other)  # of floats: NaN is itself, and 0.0 is not -0.0


def round_trip(value: Any) -> Any:
    return decode(bytearray(encode(value)))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
arrays = npst.arrays(
    st.sampled_from(["u1", "i8", "f2", "f4", ">f8", "c8", "?", "U3", "S2"]), npst.array_shapes(min_dims=0, min_side=0)
)
samples = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
    ),
    max_leaves=8,
)


@given(samples)
@settings(deadline=None)
def test_any_sample_comes_back_as_it_was(sample) -> None:
    assert same(round_trip(sample), sample)


@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 5)], ids=str)
def test_tensors(dtype, shape) -> None:
    generator = torch.Generator().manual_seed(0)
    count = int(np.prod(shape)) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    tensor = bits.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    assert same(round_trip((tensor, 1)), (tensor, 1))


def test_tensors_that_are_views() -> None:
    base = torch.arange(24.0).view(4, 6)
    for view in (base.t(), base[1:], base[0, 3], torch.complex(base, -base).conj()):
        assert same(round_trip(view), view.clone())
        assert round_trip(view).stride() == view.stride()


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (2, 3, 4, 5), (1, 3, 1, 5), (0, 3), (2, 0, 4), (1,)])
def test_layouts_in_memory_are_kept(shape) -> None:
    """Sums over a sample of another layout have other last bits."""
    array = np.random.default_rng(0).normal(size=shape)
    for order in itertools.permutations(range(len(shape))):
        moved = array.transpose(order)
        again = round_trip(moved)
        assert again.tobytes() == moved.tobytes() and again.sum() == moved.sum()
        assert again.strides == moved.strides
        tensor = torch.from_numpy(array).permute(order)
        assert torch.equal(round_trip(tensor), tensor) and round_trip(tensor).stride() == tensor.stride()


@pytest.mark.parametrize("view", [np.eye(4)[:, :2], np.eye(4)[::-1], torch.eye(4)[:, ::2], torch.ones(3).expand(2, 3)])
def test_views_with_gaps_are_not_stored(view) -> None:
    with pytest.raises(NotStorable, match="with gaps"):
        encode(view)


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16"]
)
@pytest.mark.parametrize("size", [(1, 1), (9, 5), (16, 3)], ids=str)
def test_images(mode, size) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    if mode in ("LAB", "LA", "I;16"):  # which not everything can be converted to
        picture = Image.frombytes(mode, size, bytes(range(256))[: len(Image.new(mode, size).tobytes())])
    else:
        picture = picture.convert(mode)
    assert same(round_trip(picture), picture)


def test_what_comes_back_can_be_written_to_and_stands_alone() -> None:
    data = encode((torch.zeros(3), np.zeros(3)))
    tensor, array = decode(bytearray(data))
    tensor += 1
    array += 2
    assert same(decode(bytearray(data)), (torch.zeros(3), np.zeros(3)))
    assert tensor.tolist() == [1, 1, 1] and array.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        (Point(1, 2), "test_sample_codec.Point"),
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (collections.OrderedDict(a=1), "OrderedDict"),
        (torch.zeros(2, requires_grad=True), "requires grad"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.nn.Parameter(torch.zeros(2)), "Parameter"),
        (torch.zeros(2, device="meta"), "meta"),
        (np.array([None, 1]), "dtype object"),
        (np.array(["2020-01-01"], dtype="M8[D]"), "datetime64"),
        (np.ma.masked_array([1, 2]), "MaskedArray"),
        (Image.new("P", (2, 2)), "convert"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_come_back_as_something_else_is_refused(sample, named) -> None:
    with pytest.raises(NotStorable, match=named):
        encode((torch.zeros(1), {"a": [sample]}))
