"""What codes of gradients have left out on this rank, in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_crossover.collectives.link import Link
from ddp_crossover.ddp.reducer import Reducer
from ddp_crossover.log import say


class WireCheckpoint:
    """Saves and loads what codes have left out; ``DearState`` documents both.

    Args:
        reducer: has it.
        link: knows the ranks, and uses it on the device.
    """

    def __init__(self, reducer: Reducer, link: Link) -> None:
        self._reducer = reducer
        self._link = link

    def save(self) -> dict[str, Any]:
        """See :meth:`DearState.state_dict`."""
        where = {"rank": self._link.rank, "world_size": self._link.world_size}
        feedback = self._reducer.end_iteration_of_codes()
        if feedback is None:
            return where
        with self._link.beside_legs():
            return where | feedback.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """See :meth:`DearState.load_state_dict`."""
        feedback = self._reducer.end_iteration_of_codes()
        if "steps" not in state or feedback is None:
            return
        if state["world_size"] != self._link.world_size:
            if self._link.rank == 0:
                say(
                    f"what codes of gradients have left out was saved by {state['world_size']} ranks, and there are "
                    f"{self._link.world_size}: it is dropped, and later codes will not make up for it"
                )
            return
        if state["rank"] != self._link.rank:
            raise ValueError(
                f"rank {self._link.rank} was given the state of rank {state['rank']}: save one file for each rank, and "
                "load the rank's own"
            )
        with self._link.beside_legs():
            feedback.load_state_dict(state)
