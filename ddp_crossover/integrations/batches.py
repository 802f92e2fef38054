"""Weighted batches for scripts that a framework also runs without DDP, in a single process."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

from ddp_crossover.comm_hook import DearState


class Batches:
    """What callbacks have in common that train with a state, or in a single process without one.

    Attributes:
        state: the state of the training under way, or of the last one; None before, and without DDP.
    """

    def __init__(self, **options: Any) -> None:
        self.state: DearState | None = None
        self._options = options

    def batch(self, samples: int) -> contextlib.AbstractContextManager[None]:
        """With ``weighted=True``, return ``state.batch(samples)``; in a single process a context that does nothing.

        Args:
            samples: see :meth:`ddp_crossover.DearState.batch`.

        Raises:
            RuntimeError: in one of several processes that DDP does not train; and what ``state.batch()`` raises.
        """
        if self.state is not None:
            return self.state.batch(samples)
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"batch({samples}) would weight nothing, because DearCallback has not attached to a "
                "DistributedDataParallel: call it while the Trainer trains, and let the Trainer use DDP"
            )
        return contextlib.nullcontext()

    def _detach(self) -> None:
        if self.state is not None:
            self.state.detach()
