"""What reduces DDP's buckets, one backward after the other: plain all-reduces, or the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ddp_crossover.pending.reduced_gradients import ReducedGradients
from ddp_crossover.pending.slots import Slot
from ddp_crossover.torch_internals.ddp import GradBucket


class Reduction(Protocol):
    """Is told how far an iteration has come.

    Attributes:
        is_pipelined: whether gradients and updates stay pending until they are used.
    """

    is_pipelined: bool

    @property
    def gradients(self) -> ReducedGradients | None:
        """The gradients that it leaves pending; None if it leaves none."""

    @property
    def unassigned(self) -> Sequence[Slot]:
        """Parameters that have not taken their gradients of this iteration."""

    def retire(self) -> None:
        """End the iteration: all that is under way, also of a backward that has raised."""

    def begin_backward(self, *, same_buckets: bool) -> None:
        """Begin an iteration; ``same_buckets`` if those of the last one are expected to come again."""

    def reduce(self, bucket: GradBucket, index: int, parameters: list[Tensor]) -> torch.futures.Future[Tensor]:
        """Take one bucket, by its number in this backward, and return a future of its flat gradients."""

    def before_ddp_writes(self) -> None:
        """Called when all buckets have come, before DDP writes gradients."""

    def end_backward(self) -> None:
        """Called when DDP has written them."""

    def expect_unreduced(self) -> None:
        """Called when a forward has ended whose backward is not reduced."""

    def follow(self, use_rank: Sequence[int]) -> None:
        """Called when forward uses parameters in another order than before."""

    def end_forward(
        self, call_before_backward: Callable[[Callable[[], None]], bool] | None, *, on_all_ranks: bool
    ) -> None:
        """Called when a forward has ended; see :meth:`ddp_crossover.dear.Pipeline.end_forward`."""
