"""Scatter legs are announced some legs ahead: receives are posted, so that a faster rank can send.

Gloo sends no data before the receiver has posted, and ranks drift apart by milliseconds. Receives cost memory: together
not more than a sixteenth of all gradients, unless that is little, or one leg alone does.
"""

from __future__ import annotations

from ddp_crossover.comm.link import Link
from ddp_crossover.fusion import FusionPlan
from ddp_crossover.pipeline.layout import Layout

_MAX_LEGS = 4
_PART = 1 / 16
_LITTLE_BYTES = 2**20


class Announcements:
    """Announces the scatter legs of one plan.

    Args:
        plan: the plan.
        link: posts the receives.
        layout: where gradients lie.
        every_group_arrives: False if DDP may leave out buckets; then nothing is announced.
    """

    def __init__(self, plan: FusionPlan, link: Link, layout: Layout, *, every_group_arrives: bool) -> None:
        self._link = link
        self._layout = layout
        self._legs_ahead = _legs_ahead(plan)
        self._groups = layout.groups if every_group_arrives else []
        self._same_buckets = False

    def expect_same_buckets(self, stay: bool) -> None:
        """Note whether DDP's buckets are where they will stay, so that their sizes are those of the last iteration."""
        self._same_buckets = stay

    def begin_backward(self) -> None:
        """Announce the first legs."""
        for index in range(self._legs_ahead):
            self._announce(index)

    def before(self, index: int) -> None:
        """Announce the leg that is due when the leg of this group is about to start."""
        self._announce(index + self._legs_ahead)

    def _announce(self, index: int) -> None:
        if index >= len(self._groups):
            return
        group = self._groups[index]
        is_known = self._layout.is_copied(group) or (self._same_buckets and group.buffer is not None)
        if is_known and not group.is_launched:
            group.announce()
            self._link.announce(index, self._layout.buffer_of(group))


def _legs_ahead(plan: FusionPlan) -> int:
    sizes = list(map(plan.group_bytes, plan.groups))
    allowed_bytes = max(_PART * sum(sizes), _LITTLE_BYTES)
    return max(1, min(_MAX_LEGS, int(allowed_bytes / max(sizes, default=1))))
