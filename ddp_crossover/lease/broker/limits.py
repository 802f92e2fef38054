"""How long a hold may last."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How long a hold may last, in seconds, once another job waits for its resource.

    Attributes:
        hold_s: limit for any hold, after which the resource goes to the next job and the fence is stale. A filler that
            waits for a peer does not start this limit.
        filler_s: limit for a filler's hold once a peer waits.
    """

    hold_s: float = 10.0
    filler_s: float = 0.1
