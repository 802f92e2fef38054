"""What users set when they attach, checked where it is built. Loads no torch, for commands that start scripts."""

from __future__ import annotations

import enum
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ddp_crossover.fusion import Schedule
from ddp_crossover.top_k import TopK

if TYPE_CHECKING:
    import torch

SWITCH = "DDP_CROSSOVER"
WIRE_DTYPES = ("torch.bfloat16", "torch.float16", "torch.int8")


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
        wire_dtype: dtype to which wider gradients are cast on the wire, int8 for codes of 8 bits, or None.
        compress: a sparse wire, or None.
        groups: ``"node"`` if legs have a round inside of each node, or None.
        tune: whether to try plans on real steps.
        norms: where torch's own functions take norms of gradients from.
        tuned_file: where to keep what the tuner finds, or None.
        strict: whether parameters hold NaN while they are pending.
        shard_optimizer: whether each rank updates its share of the parameters only.
        weighted: whether gradients are weighted by how many samples each rank has.

    Raises:
        ValueError: for options that are out of range or contradict each other.
    """

    fusion_mb: float | None = None
    schedule: Schedule = Schedule.AUTO
    wire_dtype: torch.dtype | None = None
    compress: TopK | None = None
    groups: str | None = None
    norms: Norms = Norms.EXACT
    tune: bool = True
    tuned_file: str | os.PathLike[str] | None = None
    strict: bool = False
    shard_optimizer: bool = False
    weighted: bool = False

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
        if self.compress is not None and not isinstance(self.compress, TopK):
            raise ValueError(f"compress must be a dx.TopK or None, got {self.compress!r}")
        if self.groups not in (None, "node"):
            raise ValueError(f"groups must be 'node' or None, got {self.groups!r}")
        if self.has_codes and self.schedule is Schedule.ALLREDUCE:
            raise ValueError(
                f"{self._asks_for_codes} codes the two legs of an all-reduce, which schedule='allreduce' does not "
                "have: leave out one of them"
            )
        if self.has_codes and self.shard_optimizer:
            raise ValueError(
                f"shard_optimizer=True gathers parameters, and {self._asks_for_codes} codes what is gathered: leave "
                "out one of them, or send gradients in 16 bits with wire_dtype=torch.bfloat16"
            )
        if self.groups is not None and self.schedule is Schedule.ALLREDUCE:
            raise ValueError(
                "groups='node' is about the two legs of an all-reduce, which schedule='allreduce' does not have: leave "
                "out one of them"
            )
        if self.groups is not None and self.shard_optimizer:
            raise ValueError("shard_optimizer=True shares parameters among all ranks: leave out groups=")

    @property
    def has_codes(self) -> bool:
        """Whether legs carry codes of gradients."""
        return str(self.wire_dtype) == "torch.int8" or self.compress is not None

    @property
    def _asks_for_codes(self) -> str:
        return "compress=" if self.compress is not None else "wire_dtype=torch.int8"

    @property
    def leaves_the_choice(self) -> bool:
        """Whether DDP may train as it was before attach if that is as fast, because nothing says what to do instead."""
        is_searched = self.schedule is Schedule.AUTO and self.fusion_mb is None
        is_ddp = self.wire_dtype is None and self.compress is None and not self.weighted
        return is_searched and is_ddp and not self.strict and not self.shard_optimizer and self.groups is None

    def shared_by_ranks(self) -> dict[str, object]:
        """Return the options in which all ranks must agree, as JSON values."""
        return {
            "schedule": self.schedule,
            "fusion_mb": self.fusion_mb,
            "wire_dtype": str(self.wire_dtype),
            "compress": None if self.compress is None else asdict(self.compress),
            "groups": self.groups,
            "norms": self.norms,
            "tune": self.tune,
            "tuned_file": self.tuned_file is not None,
            "shard_optimizer": self.shard_optimizer,
            "weighted": self.weighted,
        }
