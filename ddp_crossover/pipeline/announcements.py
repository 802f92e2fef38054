"""How many scatter legs are announced ahead: their receives are posted, so that a faster rank can send.

Gloo sends no data before the receiver has posted, and ranks drift apart by milliseconds. Receives cost memory: together
not more than a sixteenth of all gradients, unless that is little, or one leg alone does.
"""

from __future__ import annotations

from ddp_crossover.fusion import FusionPlan

_MAX_LEGS = 4
_PART = 1 / 16
_LITTLE_BYTES = 2**20


def legs_ahead(plan: FusionPlan) -> int:
    """How many legs of a plan to announce before the first of them starts; at least one."""
    sizes = list(map(plan.group_bytes, plan.groups))
    allowed_bytes = max(_PART * sum(sizes), _LITTLE_BYTES)
    return max(1, min(_MAX_LEGS, int(allowed_bytes / max(sizes, default=1))))
