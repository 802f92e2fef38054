"""Remembers which optimizers are separable, and tests an optimizer again when its settings change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from ddp_crossover.optim.separability import why_not_separable


class Separable:
    """Why each of some optimizers must not have its updates deferred, if so.

    Args:
        optimizers: the optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._reasons = {optimizer: why_not_separable(optimizer) for optimizer in optimizers}
        self._settings: dict[Optimizer, list[Any]] = {}

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._reasons)

    def __contains__(self, optimizer: object) -> bool:
        return optimizer in self._reasons

    def why_not(self, optimizer: Optimizer, *, test_again: bool = False) -> str | None:
        """Return why its updates must not be deferred, or None. Can test again if its settings have changed."""
        if test_again:
            settings = settings_of(optimizer)
            if self._settings.setdefault(optimizer, settings) != settings:
                self._settings[optimizer] = settings
                self._reasons[optimizer] = why_not_separable(optimizer)
        return self._reasons[optimizer]

    def drop_references(self) -> None:
        """Forget all optimizers."""
        self._reasons.clear()
        self._settings.clear()


def settings_of(optimizer: Optimizer) -> list[Any]:
    """Which hyperparameters are on: the value of a bool, else the type and whether it is zero.

    Leaves out ``lr``, which schedulers move to zero and back.
    """
    return [
        {
            key: value if isinstance(value, bool) else (type(value), isinstance(value, (int, float)) and not value)
            for key, value in group.items()
            if key not in ("params", "param_names", "lr")
        }
        for group in optimizer.param_groups
    ]
