"""Weighted batches for scripts that a framework also runs without DDP, in a single process."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from ddp_crossover.comm_hook import DearState


def batch_of(state: DearState | None, samples: int) -> contextlib.AbstractContextManager[None]:
    """Return ``state.batch(samples)``; without a state, a context that does nothing, as one process has no weights.

    Args:
        state: the state of the training under way; None if nothing is attached to.
        samples: number of samples, or tokens.

    Raises:
        RuntimeError: without a state in one of several processes, whose gradients would go unweighted.
    """
    if state is not None:
        return state.batch(samples)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"batch({samples}) would weight nothing, because DearCallback has not attached to a "
            "DistributedDataParallel: call it while the Trainer trains, and let the Trainer use DDP"
        )
    return contextlib.nullcontext()
