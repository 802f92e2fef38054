"""The options of a sparse wire, as users write them. Loads no torch, for commands that start scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SELECTORS = ("auto", "exact", "chunked")


@dataclass(frozen=True)
class TopK:
    """Scatter legs send the largest part of the gradients only; the rest is added to those of the next steps.

    Args:
        density: which part of the elements is sent, above 0, at most 1.
        selector: how they are found. ``"auto"``: ``"chunked"`` on CPU, ``"exact"`` elsewhere. ``"exact"``: the largest.
            ``"chunked"``: the largest of each 4096 elements, which is several times as fast on CPU and needs smaller
            indices.
        warmup: densities of the first steps, as (steps, density) in their order: ``[(500, 0.25), (500, 0.0625)]``.

    Raises:
        ValueError: for a value that is out of range.

    Example::

        state = dx.attach(ddp, optimizer, compress=dx.TopK(density=0.01), wire_dtype=torch.int8)
    """

    density: float = 0.01
    selector: str = "auto"
    warmup: Sequence[tuple[int, float]] = ()

    def __post_init__(self) -> None:
        for density in (self.density, *(density for _, density in self.warmup)):
            if not 0 < density <= 1:
                raise ValueError(f"density must be above 0 and at most 1, the part of the elements sent, got {density}")
        if self.selector not in SELECTORS:
            raise ValueError(f"selector must be one of {', '.join(SELECTORS)}, got {self.selector!r}")
        for steps, _ in self.warmup:
            if steps < 1 or not math.isfinite(steps):
                raise ValueError(f"each entry of warmup is (steps, density) with 1 step or more, got {steps} steps")
        object.__setattr__(self, "warmup", tuple((int(steps), float(density)) for steps, density in self.warmup))

    def density_at(self, step: int) -> float:
        """The density of this step, counted from 0."""
        for steps, density in self.warmup:
            if step < steps:
                return density
            step -= steps
        return self.density
