"""What the gather legs of a pipeline carry, and when they leave.

After the scatter leg each rank has the reduced gradients of its shard. The gather leg brings every shard to every rank:
as gradients, or, with a sharded optimizer, as the parameters that their owners have updated (``addons.shards``).

For the terms see [Note: DeAR's terms] in ``pipeline``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.link import Link
from ddp_crossover.fusion import FusionPlan, Schedule, gathers_behind_scatters, order_of_use
from ddp_crossover.pending.slots import Group


class Gathers(Protocol):
    """What gather legs carry, and when they leave. The pipeline tells it how far an iteration has come."""

    def landing(self, group: Group) -> FusionBuffer | None:
        """Where the gather leg arrives of a group that is laid out; None: in the fusion buffer, as gradients."""

    def launched(self, group: Group) -> None:
        """Called when the scatter leg of a group was started."""

    def end_backward(self) -> None:
        """Called when all scatter legs of the iteration were started."""

    def before_exchange(self) -> None:
        """Called before ranks exchange norms of reduced gradients."""

    def bring_gradients(self, group: Group) -> None:
        """Have this group's gradients gathered, for which somebody is about to wait, if they are not under way."""

    def end_legs(self, *, on_all_ranks: bool) -> None:
        """Start all gather legs that were not started: peers have posted their receives.

        Args:
            on_all_ranks: whether all ranks come to this place, so that they can agree here on what the legs carry.
        """

    def release(self) -> dict[str, Tensor]:
        """Return what it has of arenas by name, for the next plan, and drop everything."""


class GatherOrder:
    """The order in which gather legs leave: that in which forward uses the parameters.

    Args:
        plan: the plan, with the order that all ranks have agreed on.
        link: runs the legs.
        groups: the plan's fusion groups.

    Attributes:
        leaves_when_idle: whether gather legs are sent when the link would be idle, in an order that may differ between
            ranks.
    """

    def __init__(self, plan: FusionPlan, link: Link, groups: Sequence[Group]) -> None:
        self._plan = plan
        self._link = link
        self._groups = groups
        self._urgency = {group: place for place, group in enumerate(plan.use_order)}
        # If the link needs one launch order on all ranks, the plan says which gather legs go between scatter legs.
        self._followers = {} if link.chooses_gather_order else gathers_behind_scatters(plan)
        self.leaves_when_idle = link.chooses_gather_order and plan.schedule is Schedule.AUTO

    def follow(self, use_rank: Sequence[int]) -> None:
        """Gather in the forward's new use order from now on, if the link allows a different order on each rank."""
        if self._link.chooses_gather_order:
            order = order_of_use(self._plan.groups, use_rank)
            self._urgency = {group: place for place, group in enumerate(order)}

    def urgency(self, group: Group) -> int:
        """Place of a group in this rank's use order."""
        return self._urgency[group.spec.index]

    def followers(self, group: Group) -> list[Group]:
        """The groups whose gather legs go behind the scatter leg of this one."""
        return [self._groups[index] for index in self._followers.get(group.spec.index, ())]

    def in_use_order(self) -> list[Group]:
        """All groups, in the use order of the plan, which is the same on all ranks."""
        return [self._groups[index] for index in self._plan.use_order]


class GradientGathers:
    """Gather legs that carry gradients: they leave behind scatter legs, or at the end of backward."""

    def __init__(self, order: GatherOrder) -> None:
        self._order = order

    def landing(self, group: Group) -> FusionBuffer | None:
        """Gradients arrive in the fusion buffer. For what is asked here and below see :class:`Gathers`."""
        return None

    def launched(self, group: Group) -> None:
        """Start the gather legs that go behind this scatter leg."""
        if self._order.leaves_when_idle:
            group.start_gather(self._order.urgency(group))
        for follower in self._order.followers(group):
            follower.start_gather()

    def end_backward(self) -> None:
        """Start the others."""
        for group in self._order.in_use_order():
            group.start_gather()

    def before_exchange(self) -> None:
        """Nothing to do."""

    def bring_gradients(self, group: Group) -> None:
        """Nothing to do: they are under way since the end of backward."""

    def end_legs(self, *, on_all_ranks: bool) -> None:
        """Start those of a backward that raised."""
        self.end_backward()

    def release(self) -> dict[str, Tensor]:
        """There are none."""
        return {}
