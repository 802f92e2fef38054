"""What users set when they attach, checked where it is built. Loads no torch, for commands that start scripts."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_crossover.fusion import Schedule

if TYPE_CHECKING:
    import torch

SWITCH = "DDP_CROSSOVER"
WIRE_DTYPES = ("torch.bfloat16", "torch.float16")


def switched_off() -> bool:
    """Whether the environment says ``DDP_CROSSOVER=off``: then nothing is attached, and DDP trains as without us.

    Raises:
        ValueError: for a value that is neither on nor off.
    """
    value = os.environ.get(SWITCH, "on").strip().lower()
    if value not in ("on", "1", "", "off", "0"):
        raise ValueError(f"{SWITCH}={value} in the environment is neither on nor off: set it to off, or leave it out")
    return value in ("off", "0")


class Norms(enum.StrEnum):
    """Where ``clip_grad_norm_`` and ``GradScaler`` of torch take norms of gradients from."""

    EXACT = "exact"
    SHARDED = "sharded"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a ``DearState``, which documents them.

    Attributes:
        fusion_mb: size of a fusion group on the wire in MiB, or None to search for it.
        schedule: when legs are sent.
        wire_dtype: dtype to which wider gradients are cast on the wire, or None.
        tune: whether to try plans on real steps.
        norms: where torch's own functions take norms of gradients from.
        tuned_file: where to keep what the tuner finds, or None.
        strict: whether parameters hold NaN while they are pending.
        shard_optimizer: whether each rank updates its share of the parameters only.

    Raises:
        ValueError: for options that are out of range or contradict each other.
    """

    fusion_mb: float | None = None
    schedule: Schedule = Schedule.AUTO
    wire_dtype: torch.dtype | None = None
    norms: Norms = Norms.EXACT
    tune: bool = True
    tuned_file: str | os.PathLike[str] | None = None
    strict: bool = False
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in list(Schedule):
            raise ValueError(f"schedule must be one of {', '.join(Schedule)}, got {self.schedule!r}")
        object.__setattr__(self, "schedule", Schedule(self.schedule))  # users write a string
        if self.norms not in list(Norms):
            raise ValueError(f"norms must be one of {', '.join(Norms)}, got {self.norms!r}")
        object.__setattr__(self, "norms", Norms(self.norms))
        if self.fusion_mb is not None and not self.fusion_mb > 0:
            raise ValueError(f"fusion_mb must be greater than 0 (MiB per fusion group), got {self.fusion_mb}")
        if self.tuned_file is not None and (self.schedule is not Schedule.AUTO or self.fusion_mb is not None):
            raise ValueError(
                "tuned_file keeps the group size that the tuner finds, and the tuner runs only with schedule='auto' "
                f"and without fusion_mb, got schedule={str(self.schedule)!r} and fusion_mb={self.fusion_mb}: leave out "
                "tuned_file, or let the tuner run"
            )
        if self.shard_optimizer and self.schedule is Schedule.ALLREDUCE:
            raise ValueError(
                "shard_optimizer=True updates shards between the two legs of an all-reduce, which schedule='allreduce' "
                "does not have: leave out one of them"
            )
        if self.wire_dtype is not None and str(self.wire_dtype) not in WIRE_DTYPES:
            raise ValueError(
                f"wire_dtype must be {' or '.join(WIRE_DTYPES)}, got {self.wire_dtype!r}: leave it out to "
                "send gradients in their own dtype"
            )

    @property
    def leaves_the_choice(self) -> bool:
        """Whether DDP may train as it was before attach if that is as fast, because nothing says what to do instead."""
        is_searched = self.schedule is Schedule.AUTO and self.fusion_mb is None
        return is_searched and self.wire_dtype is None and not self.strict and not self.shard_optimizer

    def shared_by_ranks(self) -> dict[str, object]:
        """Return the options in which all ranks must agree, as JSON values."""
        return {
            "schedule": self.schedule,
            "fusion_mb": self.fusion_mb,
            "wire_dtype": str(self.wire_dtype),
            "norms": self.norms,
            "tune": self.tune,
            "tuned_file": self.tuned_file is not None,
            "shard_optimizer": self.shard_optimizer,
        }
