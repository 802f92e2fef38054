"""Which gradients of a model travel as codes, and what these leave out: a port, and the plain case of no codes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ddp_crossover.comm.fusion_buffer import Travel
from ddp_crossover.comm.stream_order import StreamOrder
from ddp_crossover.fusion import FusionGroup, FusionPlan
from ddp_crossover.pending.slots import Group, Slot


class CodedSteps(Protocol):
    """The training steps of one plan."""

    def travel(self, group: FusionGroup) -> Travel | None:
        """How the slices of a group's fusion buffer travel; None: as they are."""

    def use(self, arenas: Mapping[str, Tensor]) -> None:
        """Know the memory of the fusion buffers, by name, once it is laid out."""

    def begin(self) -> None:
        """Called when a backward begins."""

    def end(self, groups: Sequence[Group], unassigned: Collection[Slot]) -> None:
        """Called when all legs of a step have ended.

        Args:
            groups: all fusion groups.
            unassigned: parameters that have not taken the gradients of this step.
        """


class Codes(Protocol):
    """What of one model's gradients travels as codes, under one plan after the other."""

    def steps(self, plan: FusionPlan, order: StreamOrder) -> CodedSteps:
        """The steps under a plan, for which nothing is laid out yet."""

    def state_dict(self, end_iteration: Callable[[], None]) -> dict[str, Any]:
        """What codes have left out on this rank; calls ``end_iteration()`` first if that would change it."""

    def load_state_dict(self, state: Mapping[str, Any], end_iteration: Callable[[], None]) -> None:
        """The inverse of :meth:`state_dict`. ``state`` has ``rank`` and ``world_size``, too.

        Raises:
            ValueError: if it is the state of another model, or of another rank.
        """


class NoCodes:
    """All gradients travel as they are, or cast; steps of a plan without codes, too."""

    def steps(self, plan: FusionPlan, order: StreamOrder) -> NoCodes:
        return self

    def state_dict(self, end_iteration: Callable[[], None]) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], end_iteration: Callable[[], None]) -> None:
        pass

    def travel(self, group: FusionGroup) -> None:
        pass

    def use(self, arenas: Mapping[str, Tensor]) -> None:
        pass

    def begin(self) -> None:
        pass

    def end(self, groups: Sequence[Group], unassigned: Collection[Slot]) -> None:
        pass


NO_CODES = NoCodes()
