"""What gradients are on the wire: as they are, or cast to a narrower dtype. Add-ons make others of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Wire:
    """What gradients are on the wire, for each parameter and each leg.

    Attributes:
        cast_to: dtype to which wider gradients are cast; None keeps every gradient's dtype.
    """

    cast_to: torch.dtype | None = None

    @property
    def plain(self) -> Wire:
        """The wire without codes."""
        return Wire(self.cast_to)

    @property
    def has_codes(self) -> bool:
        """Whether some parameters may be coded."""
        return False

    def is_coded(self, parameter: Tensor) -> bool:
        """Whether legs carry codes of a parameter's gradient."""
        return False

    def travels_as(self, dtype: torch.dtype, *, is_coded: bool = False) -> torch.dtype:
        """The dtype of a gradient in a fusion buffer: that to which it is cast, if that is narrower."""
        return self.cast_to if self.cast_to is not None and self.cast_to.itemsize < dtype.itemsize else dtype

    def leg_bytes(self) -> tuple[float, float]:
        """Bytes per element of a coded gradient that a scatter leg and a gather leg send."""
        raise NotImplementedError

    @property
    def align_numel(self) -> int:
        """Multiple of elements at which coded gradients and shards begin."""
        return 1

    def codec_s_per_element(self, device: torch.device) -> float:
        """Seconds by which codes delay a leg, per element of its fusion buffer, measured now; the mean of both legs."""
        return 0.0
