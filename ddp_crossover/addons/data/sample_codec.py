"""One sample of a data set as bytes, and back: tensors, arrays and PIL images in tuples, lists and dicts.

Layout: the length of the description (8 bytes, little-endian), the description as JSON, and then the buffers of arrays
and images, each at a multiple of 64 bytes. Nothing in it is code: reading a sample that somebody else has made runs
none.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")
_MODES = frozenset({"1", "L", "LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16"})
"""Modes of PIL images whose pixels are all that they are; "P" has a palette as well."""


class NotStorable(Exception):
    """A sample holds what cannot be stored; the message names it."""


def encode(sample: Any) -> bytes:
    """Raises NotStorable for what :func:`decode` could not give back as it is."""
    buffers: list[memoryview | bytes] = []
    description = json.dumps(_describe(sample, buffers), separators=(",", ":")).encode()
    parts: list[memoryview | bytes] = [_LENGTH.pack(len(description)), description]
    length = _LENGTH.size + len(description)
    for buffer in buffers:
        parts += [bytes(_aligned(length) - length), buffer]
        length = _aligned(length) + len(buffer)
    return b"".join(parts)


def decode(data: bytearray) -> Any:
    """The sample that :func:`encode` was given. Tensors and arrays are views of ``data``, and may be written to."""
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    reader = _Reader(data, start)
    return reader.build(json.loads(data[_LENGTH.size : start]))


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


# A description is the value itself if JSON has it, and else a list of a tag and what belongs to it. Exact types only:
# what a subclass adds would be lost.


def _describe(value: Any, buffers: list[memoryview | bytes]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in _DESCRIBE:
        return _DESCRIBE[kind](value, buffers)
    if isinstance(value, np.generic):
        return ["number", *_array(np.asarray(value), buffers)]
    if _is_image(value):
        return _image(value, buffers)
    raise NotStorable(f"a {kind.__module__}.{kind.__qualname__}")


def _tensor(tensor: torch.Tensor, buffers: list[memoryview | bytes]) -> list[Any]:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise NotStorable(f"a {tensor.layout} tensor on {tensor.device}, not a dense one on the CPU")
    if tensor.requires_grad:
        raise NotStorable("a tensor that requires grad")
    order = _order(tensor.shape, tensor.stride())
    dense = tensor.resolve_conj().resolve_neg().permute(order)
    if not dense.is_contiguous():
        raise NotStorable("a tensor that is a view with gaps (tensor.contiguous() makes one that can be stored)")
    flat = dense.reshape(-1)
    buffers.append(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return ["tensor", str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride())]


def _order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions as they follow in memory, which is kept: sums over samples of another layout have other bits."""
    return sorted(range(len(shape)), key=lambda place: (-strides[place], place) if shape[place] > 1 else (0, place))


def _ndarray(array: np.ndarray, buffers: list[memoryview | bytes]) -> list[Any]:
    return ["array", *_array(array, buffers)]


def _array(array: np.ndarray, buffers: list[memoryview | bytes]) -> list[Any]:
    if array.dtype.kind not in "biufcSU":
        raise NotStorable(f"an array of dtype {array.dtype}")
    order = _order(array.shape, array.strides)
    dense = array.transpose(order)
    if not dense.flags.c_contiguous:
        raise NotStorable("an array that is a view with gaps, or backwards (array.copy() makes one that can be stored)")
    buffers.append(dense.tobytes())
    return [array.dtype.str, list(array.shape), list(array.strides)]


def _is_image(value: Any) -> bool:
    pil = sys.modules.get("PIL.Image")  # whoever has an image has imported it
    return pil is not None and isinstance(value, pil.Image)


def _image(image: Any, buffers: list[memoryview | bytes]) -> list[Any]:
    if image.mode not in _MODES:
        raise NotStorable(f"a PIL image of mode {image.mode!r} (image.convert('RGB') makes one that can be stored)")
    buffers.append(image.tobytes())
    return ["image", image.mode, list(image.size)]


def _bytes(value: bytes, buffers: list[memoryview | bytes]) -> list[Any]:
    buffers.append(value)
    return ["bytes", len(value)]


def _sequence(tag: str) -> Callable[[Any, list[memoryview | bytes]], list[Any]]:
    return lambda values, buffers: [tag, [_describe(value, buffers) for value in values]]


def _dict(values: dict[Any, Any], buffers: list[memoryview | bytes]) -> list[Any]:
    return ["dict", [[_describe(key, buffers), _describe(value, buffers)] for key, value in values.items()]]


_DESCRIBE: dict[type, Callable[[Any, list[memoryview | bytes]], list[Any]]] = {
    torch.Tensor: _tensor,
    np.ndarray: _ndarray,
    bytes: _bytes,
    tuple: _sequence("tuple"),
    list: _sequence("list"),
    dict: _dict,
}


class _Reader:
    """Builds values from their descriptions, taking buffers in the order in which they were written."""

    def __init__(self, data: bytearray, offset: int) -> None:
        self._data = data
        self._offset = offset
        self._builders: dict[str, Callable[..., Any]] = {
            "tensor": self._tensor,
            "array": self._array,
            "number": self._number,
            "image": self._image,
            "bytes": self._bytes,
            "tuple": self._tuple,
            "list": self._list,
            "dict": self._dict,
        }

    def build(self, description: Any) -> Any:
        if not isinstance(description, list):
            return description
        tag, *details = description
        return self._builders[tag](*details)

    def _take(self, length: int) -> memoryview:
        start = _aligned(self._offset)
        self._offset = start + length
        return memoryview(self._data)[start : self._offset]

    def _tensor(self, name: str, shape: list[int], strides: list[int]) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, name)
        count = math.prod(shape)
        buffer = self._take(count * dtype.itemsize)
        flat = torch.frombuffer(buffer, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
        return flat.as_strided(shape, strides)

    def _array(self, dtype_text: str, shape: list[int], strides: list[int]) -> np.ndarray:
        dtype = np.dtype(dtype_text)
        buffer = self._take(math.prod(shape) * dtype.itemsize)
        return np.ndarray(shape, dtype, buffer, strides=tuple(strides))

    def _number(self, dtype_text: str, shape: list[int], strides: list[int]) -> Any:
        return self._array(dtype_text, shape, strides)[()]

    def _image(self, mode: str, size: list[int]) -> Any:
        from PIL import Image

        # Rows of mode "1" are whole bytes.
        bits = {"1": 1, "L": 8, "LA": 16, "RGB": 24, "YCbCr": 24, "LAB": 24, "HSV": 24, "I;16": 16}.get(mode, 32)
        row_bytes = -(-size[0] * bits // 8)
        return Image.frombytes(mode, (size[0], size[1]), self._take(row_bytes * size[1]))

    def _bytes(self, length: int) -> bytes:
        return bytes(self._take(length))

    def _tuple(self, values: list[Any]) -> tuple[Any, ...]:
        return tuple(self._list(values))

    def _list(self, values: list[Any]) -> list[Any]:
        return [self.build(value) for value in values]

    def _dict(self, items: list[list[Any]]) -> dict[Any, Any]:
        return {self.build(key): self.build(value) for key, value in items}
