"""What codes of gradients have left out on this rank, in checkpoints. ``DearState`` documents both functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_crossover.comm.link import Link
from ddp_crossover.hook.reducer import Reducer
from ddp_crossover.log import say


def save_left_out(reducer: Reducer, link: Link) -> dict[str, Any]:
    """See :meth:`DearState.state_dict`."""
    where = {"rank": link.rank, "world_size": link.world_size}
    feedback = reducer.end_iteration_of_codes()
    if feedback is None:
        return where
    with link.beside_legs():
        return where | feedback.state_dict()


def load_left_out(state: Mapping[str, Any], reducer: Reducer, link: Link) -> None:
    """See :meth:`DearState.load_state_dict`."""
    feedback = reducer.end_iteration_of_codes()
    if "steps" not in state or feedback is None:
        return
    if state["world_size"] != link.world_size:
        if link.rank == 0:
            say(
                f"what codes of gradients have left out was saved by {state['world_size']} ranks, and there are "
                f"{link.world_size}: it is dropped, and later codes will not make up for it"
            )
        return
    if state["rank"] != link.rank:
        raise ValueError(
            f"rank {link.rank} was given the state of rank {state['rank']}: save one file for each rank, and load the "
            "rank's own"
        )
    with link.beside_legs():
        feedback.load_state_dict(state)
