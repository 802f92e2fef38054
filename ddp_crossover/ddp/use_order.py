"""The order in which a model's forward uses its parameters."""

from __future__ import annotations

from collections.abc import Callable

from ddp_crossover.parameters.lazy_params import LazyParam


class UseOrder:
    """Follows the latest forward.

    Args:
        parameters: number of parameters.
    """

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters
        self._now: list[LazyParam] = []
        self._latest: list[LazyParam] = []
        self.is_known = False

    def begin_forward(self) -> Callable[[LazyParam], None]:
        """A forward begins. Returns what to call when it uses a parameter for the first time since the last step."""
        self._now = []
        return self._now.append

    def end_forward(self) -> bool:
        """The forward has ended. Returns whether it has used parameters in another order than the one before.

        One that has used fewer, as the second one of a step, tells nothing.
        """
        self.is_known = True
        if len(self._now) < len(self._latest) or self._now == self._latest:
            return False
        self._latest = self._now
        return True

    def ranks(self) -> list[int]:
        """For each parameter its place in the order; -1, before all others, for those that were not seen in use."""
        ranks = [-1] * self._parameters
        for place, lazy in enumerate(self._latest):
            ranks[lazy.index] = place
        return ranks
