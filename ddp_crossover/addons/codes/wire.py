"""Gradients that are codes on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddp_crossover.addons.codes.block_int8 import BlockInt8
from ddp_crossover.addons.codes.cast import Cast
from ddp_crossover.addons.codes.choice import fastest
from ddp_crossover.addons.codes.codec import Codec
from ddp_crossover.addons.codes.probe import seconds_per_element
from ddp_crossover.addons.codes.top_k import Selector, TopKCodec
from ddp_crossover.comm.wire import Wire
from ddp_crossover.top_k import TopK

_CODED_DTYPE = torch.float32
# By wire dtype: what does not stand here is a cast.
CODES: Mapping[torch.dtype, type[Codec]] = {torch.int8: BlockInt8}
# Sizes of codes per element are taken from a slice of this size.
_TYPICAL_NUMEL = 2**18


@dataclass(frozen=True)
class CodedWire(Wire):
    """Codes of most gradients; what is not coded travels as ``cast_to`` says.

    Attributes:
        scatter: codec of scatter legs, for parameters that are coded; None if none is.
        gather: codec of gather legs, likewise; None sends sums as they are.
        top_k: the options of a sparse scatter leg.
        has_feedback: whether what codes leave out is made up for later; False only to see what that is worth.
    """

    scatter: Codec | None = None
    gather: Codec | None = None
    top_k: TopK | None = None
    has_feedback: ClassVar[bool] = True

    @property
    def has_codes(self) -> bool:
        return self.scatter is not None

    def is_coded(self, parameter: Tensor) -> bool:
        """Whether legs carry codes of a parameter's gradient. One-dimensional ones are few, and matter more."""
        return self.has_codes and parameter.dim() > 1 and parameter.numel() > 0 and parameter.is_floating_point()

    def travels_as(self, dtype: torch.dtype, *, is_coded: bool = False) -> torch.dtype:
        """The dtype of a gradient in a fusion buffer: fp32 for codes."""
        return _CODED_DTYPE if is_coded else super().travels_as(dtype)

    def leg_bytes(self) -> tuple[float, float]:
        as_is = float(_CODED_DTYPE.itemsize)
        scatter, gather = (
            as_is if codec is None else codec.payload_bytes(_TYPICAL_NUMEL) / _TYPICAL_NUMEL
            for codec in (self.scatter, self.gather)
        )
        return scatter, gather

    @property
    def align_numel(self) -> int:
        return max((codec.align_numel for codec in self._codecs()), default=1)

    def codec_s_per_element(self, device: torch.device) -> float:
        """Every element is encoded once and decoded once on the way to all ranks, with time for the sum in between."""
        return sum(seconds_per_element(codec, device) for codec in self._codecs()) / 2

    def _codecs(self) -> list[Codec]:
        return [codec for codec in (self.scatter, self.gather) if codec is not None]


def wire_of(wire_dtype: torch.dtype | None, compress: TopK | None = None, *, on_host: bool = True) -> Wire:
    """What a user's options ask for; ``on_host`` is whether gradients are encoded there."""
    code = fastest(CODES[wire_dtype], on_host=on_host)() if wire_dtype is not None and wire_dtype in CODES else None
    cast_to = wire_dtype if code is None else None
    if compress is None:
        return Wire(cast_to) if code is None else CodedWire(cast_to, code, code)
    gather = code if cast_to is None else Cast(cast_to)
    auto = Selector.CHUNKED if on_host else Selector.EXACT
    selector = auto if compress.selector == "auto" else Selector(compress.selector)
    scatter = fastest(TopKCodec, on_host=on_host)(compress.density, selector)
    return CodedWire(cast_to, scatter, gather, compress)
