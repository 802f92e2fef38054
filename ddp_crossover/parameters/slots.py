"""State of each parameter and each fusion group during an iteration.

For the terms see [Note: DeAR's terms] in ``dear.py``.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from torch import Tensor
from torch.nn import Parameter

from ddp_crossover.collectives.leg import Leg, ScatterLeg
from ddp_crossover.fusion import FusionGroup
from ddp_crossover.parameters.pending_gradient import PendingGradPool


class Slot:
    """One parameter and its place in the fusion buffers.

    Attributes:
        index: position among the parameters that DDP manages.
        name: full name, for messages.
        parameter: the parameter.
        view: its gradient inside the fusion buffers, in the wire dtype.
        is_cast: whether the wire dtype differs from the parameter's dtype.
        groups: the fusion groups that carry a piece of it.
        pending: makes its ``PendingGrad``.
        deliver: called by its ``PendingGrad`` to get the value.
        scales: factors (0-dim tensors) by which the complete gradient is multiplied, in the parameter's dtype.
        is_kept: whether a script keeps the memory of its gradient, so that it was delivered at the end of backward.
        version_before: version counter of ``.grad`` when its bucket arrived, to tell whether DDP wrote to it since.
    """

    __slots__ = (
        "deliver",
        "groups",
        "index",
        "is_cast",
        "is_kept",
        "name",
        "parameter",
        "pending",
        "scales",
        "version_before",
        "view",
    )

    def __init__(self, index: int, name: str, parameter: Parameter, view: Tensor, lock: threading.RLock) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.view = view
        self.is_cast = view.dtype is not parameter.dtype
        self.groups: list[GroupInFlight] = []
        self.pending = PendingGradPool(view, parameter.dtype, lock)
        self.scales: tuple[Tensor, ...] = ()
        self.is_kept = False
        self.version_before = -1
        self.deliver: Callable[[Tensor], Tensor]


class GroupState(enum.Enum):
    """How far a fusion group has come in an iteration."""

    # The next backward brings every state back to FILLING.
    FILLING = "some of its gradients have not arrived"  # -> ANNOUNCED, or as from there
    ANNOUNCED = "peers may send their gradients already"  # -> SCATTERING: the last gradient was staged; -> UNUSED
    SCATTERING = "its scatter leg was started"  # -> GATHERING; skipped if both legs are one all-reduce
    GATHERING = "its gather leg was started"  # -> COMPLETE: code that needs a gradient has waited for it
    COMPLETE = "its buffer holds the reduced gradients"
    UNUSED = "no rank has used its parameters, so nothing was sent"


class GroupInFlight:
    """A fusion group in the current iteration.

    Attributes:
        spec: what it carries, from the plan.
        buffer: its fusion buffer.
        slots: its parameters.
        state: how far it has come.
        missing: number of its gradients, or parts of them, that have not arrived.
        scatter: its scatter leg, from ``SCATTERING`` on.
        gather: its gather leg, from ``GATHERING`` on; the same object if both legs are one all-reduce.
    """

    def __init__(self, spec: FusionGroup, buffer: Tensor, slots: list[Slot]) -> None:
        self.spec = spec
        self.buffer = buffer
        self.slots = slots
        self.reset()
        self.state = GroupState.UNUSED

    def reset(self) -> None:
        """Begin the next iteration."""
        self.state = GroupState.FILLING
        self.missing = len(self.spec.pieces)
        self.scatter: ScatterLeg | None = None
        self.gather: Leg | None = None

    @property
    def is_complete(self) -> bool:
        """Whether its buffer holds what it will hold in this iteration."""
        return self.state is GroupState.COMPLETE or self.state is GroupState.UNUSED

    @property
    def is_launched(self) -> bool:
        """Whether its scatter leg was started in this iteration."""
        return self.scatter is not None
