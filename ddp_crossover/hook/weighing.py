"""What the gradients of each rank weigh: a port, and the plain case, in which all weigh the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch.optim import Optimizer

from ddp_crossover.pending.slots import Slot


class Weighing(Protocol):
    """Says what the gradients of each rank weigh, one backward after the other.

    Attributes:
        may_leave_out_forwards: whether a rank may make no forward where others make one whose gradients are not
            reduced.
        needs_reduction: whether gradients that DDP has not reduced are an error, because nothing has weighted them.
    """

    may_leave_out_forwards: bool
    needs_reduction: bool

    @property
    def is_settled(self) -> bool:
        """Whether the sizes of batches will stay about as they are, so that measured times hold."""

    def weigh(self) -> None:
        """Set the weights of the backward that begins; may wait for the other ranks."""

    def refuse_unweighted(self, unassigned: Sequence[Slot]) -> None:
        """Raise RuntimeError if the backward has left gradients in ``.grad`` that DDP has not reduced."""

    def refuse_unreduced(self, optimizer: Optimizer, *, were_added_to: bool) -> None:
        """Raise RuntimeError if the step that begins would use samples whose gradients are not reduced.

        Args:
            optimizer: whose step it is.
            were_added_to: whether a later backward has added to reduced gradients.
        """

    def end(self) -> None:
        """Set the weights of a backward whose forward has begun, while ranks can still tell each other."""

    def remove(self) -> None:
        """Weigh no more: DDP weighs all ranks the same."""


class EqualWeights:
    """The gradients of all ranks weigh the same."""

    is_settled = True
    may_leave_out_forwards = False
    needs_reduction = False

    def weigh(self) -> None:
        pass

    def refuse_unweighted(self, unassigned: Sequence[Slot]) -> None:
        pass

    def refuse_unreduced(self, optimizer: Optimizer, *, were_added_to: bool) -> None:
        pass

    def end(self) -> None:
        pass

    def remove(self) -> None:
        pass
