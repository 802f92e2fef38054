"""Records the order in which a model's forward uses its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddp_crossover.parameters.lazy_params import LazyParam


class UseOrder:
    """Keeps the order of the latest forward that used at least as many parameters as the one kept before.

    Args:
        parameters: number of parameters.
    """

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters
        self._now: list[LazyParam] = []
        self._latest: list[LazyParam] = []
        self.is_known = False

    def begin_forward(self) -> Callable[[LazyParam], None]:
        """Begin a forward; returns the callback for each parameter's first use since the last step."""
        self._now = []
        return self._now.append

    def end_forward(self) -> bool:
        """End the forward; returns whether it has used parameters in a new order.

        A forward that used fewer parameters, such as the second one of a step, does not change the order.
        """
        self.is_known = True
        if len(self._now) < len(self._latest) or self._now == self._latest:
            return False
        self._latest = self._now
        return True

    def sorted(self, lazies: Sequence[LazyParam]) -> list[LazyParam]:
        """Return all parameters in the order, or as they are given while it is not known."""
        if not self.is_known:
            return list(lazies)
        ranks = self.ranks()
        return sorted(lazies, key=lambda lazy: ranks[lazy.index])

    def ranks(self) -> list[int]:
        """Return each parameter's place in the order; -1, before all others, for a parameter not seen in use."""
        ranks = [-1] * self._parameters
        for place, lazy in enumerate(self._latest):
            ranks[lazy.index] = place
        return ranks
