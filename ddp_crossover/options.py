"""What users set when they attach, checked where it is built. Loads no torch, for commands that start scripts."""

from __future__ import annotations

import difflib
import enum
import os
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, TypedDict

from ddp_crossover.fusion import Schedule
from ddp_crossover.top_k import TopK

if TYPE_CHECKING:
    import torch

SWITCH = "DDP_CROSSOVER"
# Options in which each rank may differ from the others.
_OF_RANK = {"is_of_rank": True}
CODED_DTYPES = ("torch.int8",)
WIRE_DTYPES = ("torch.bfloat16", "torch.float16", *CODED_DTYPES)
MOST_CONNECTIONS = 8


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


class GivenOptions(TypedDict, total=False):
    """The keyword arguments that :class:`Options` is made of, for type checkers and editors."""

    fusion_mb: float | None
    schedule: str
    wire_dtype: torch.dtype | None
    compress: TopK | None
    groups: str | None
    connections: int
    norms: str
    tune: bool
    tuned_file: str | os.PathLike[str] | None
    strict: bool
    shard_optimizer: bool
    weighted: bool


@dataclass(frozen=True, kw_only=True)
class Options:
    """What :class:`DearState` and :func:`attach` take beside model and optimizer.

    Attributes:
        fusion_mb: size of a fusion group on the wire, in MiB. Larger groups cost less latency, smaller ones overlap
            more finely. Default: the fastest size, found from measured times and by trials; with
            ``schedule="dear"`` a sixteenth of the model, from 0.25 to 8 MiB.
        schedule: ``"auto"``: reduce-scatters in backward; all-gathers whenever the link would be idle, in
            backward and in the next forward. ``"dear"``: as in the paper: all reduce-scatters, then all-gathers in
            use order. ``"allreduce"``: plain all-reduce in the hook, nothing deferred.
        wire_dtype: ``torch.bfloat16`` or ``torch.float16``: gradients of a wider dtype are cast to it, after the
            division by the world size, and cast back when they are used. Gloo adds 16-bit gradients up in fp32, in
            rank order, and rounds the sum once; NCCL adds in the wire dtype. This halves the bytes of fp32, and the
            parameters are no longer those of plain fp32 DDP. float16 ends at 65504: use it with a loss scaler.
            ``torch.int8``: gradients travel as 8-bit codes in blocks of 64 with a 16-bit scale, 1.03 bytes per element,
            and what a code leaves out is added to later gradients. Gradients of one-dimensional parameters travel as
            they are. Default: gradients are sent in their own dtype. See ``docs/compression.md``.
        compress: a :class:`TopK`: reduce-scatters send only the largest part of the gradients, all-gathers the sums as
            ``wire_dtype`` says.
        groups: ``"node"``: over gloo, a scatter leg first adds up inside of each node, then across nodes between the
            ranks with the same place on theirs; a gather leg goes the other way. Fewer messages and bytes of a rank
            cross between nodes. Gradients are added up in rank order on each node, then in the order of the nodes'
            lowest ranks, so from three ranks on the last bits are not those without it; 16-bit sums are rounded once
            in each round. Codes travel across nodes only. Nodes are torchrun's, else hosts, and need equally many
            ranks. NCCL chooses by itself. Default: all ranks exchange with all others.
        connections: number of connections to each peer over gloo, 1 to 8, of which each carries a part of every larger
            slice. For links that limit a connection: clouds do, and so does TCP over long distances. ``doctor`` says
            whether it helps. Each takes a socket for each peer, and some threads. NCCL chooses by itself.
        norms: ``"exact"``: ``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` give the bits of plain DDP,
            and wait for all gradients, so that no update is deferred in a step that clips. ``"sharded"``: they take
            norms from the ranks' shards and leave the factor pending, so the overlap is kept; the last bits of the norm
            may differ. Then every rank must make the same calls of these functions, in the same order.
        tune: with ``schedule="auto"`` and no ``fusion_mb``: try group sizes, plain all-reduce, and DDP as it was, on
            some 70 training steps, at most 136 where their times are spread (results stay exact), and keep the fastest.
            If that is DDP as it was, it is left alone, see :attr:`DearState.detached`. False: use what the measured
            times predict.
        tuned_file: path of a JSON file in which rank 0 stores the result of tuning, for the next run to load.
        shard_optimizer: each rank updates its share of the parameters and keeps their optimizer state only, which then
            takes 1/world_size of the memory; gather legs carry updated parameters instead of gradients. For optimizers
            whose updates can be deferred; one that works on whole matrices or tensors (Muon) updates each on one rank.
            ``optimizer.state_dict()`` needs :meth:`DearState.consolidate` first, and a read of ``.grad`` becomes a
            collective, which every rank must make: clip with ``norms="sharded"``. Ranks must not change parameters
            differently, which is an error in ``step()``, except through ``p.data``. See ``docs/sharded.md``.
        weighted: ranks may have batches of different sizes, which :meth:`DearState.batch` tells; gradients are those of
            the mean over all samples of all ranks. With equal sizes they have the bits of plain DDP.
        strict: debugging aid. Parameters hold NaN while their update is pending, so that a read which was not
            intercepted shows in the results, and ranks with shards compare all of them in each step. Costs a copy of
            the parameters.

    Raises:
        ValueError: for options that are out of range or contradict each other.
    """

    fusion_mb: float | None = None
    schedule: Schedule = Schedule.AUTO
    wire_dtype: torch.dtype | None = None
    compress: TopK | None = None
    groups: str | None = None
    connections: int = 1
    norms: Norms = Norms.EXACT
    tune: bool = True
    tuned_file: str | os.PathLike[str] | None = field(default=None, metadata=_OF_RANK)
    strict: bool = field(default=False, metadata=_OF_RANK)
    shard_optimizer: bool = False
    weighted: bool = False

    @classmethod
    def given(cls, options: GivenOptions) -> Options:
        """The options that a user has given.

        Raises:
            TypeError: for one that does not exist.
            ValueError: as the class.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                way_out = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise TypeError(f"there is no option {name}: {way_out}")
        return cls(**options)  # type: ignore[arg-type]  # strings are as good as enums

    def __post_init__(self) -> None:
        if self.schedule not in list(Schedule):
            raise ValueError(f"schedule must be one of {', '.join(Schedule)}, got {self.schedule!r}")
        object.__setattr__(self, "schedule", Schedule(self.schedule))  # users write a string
        if self.norms not in list(Norms):
            raise ValueError(f"norms must be one of {', '.join(Norms)}, got {self.norms!r}")
        object.__setattr__(self, "norms", Norms(self.norms))
        for name in ("tune", "strict", "shard_optimizer", "weighted"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if type(self.connections) is not int or not 1 <= self.connections <= MOST_CONNECTIONS:
            raise ValueError(f"connections must be a number from 1 to {MOST_CONNECTIONS}, got {self.connections!r}")
        if self.fusion_mb is not None and not (isinstance(self.fusion_mb, int | float) and self.fusion_mb > 0):
            raise ValueError(
                f"fusion_mb must be a number greater than 0 (MiB per fusion group), got {self.fusion_mb!r}"
            )
        if not isinstance(self.tuned_file, str | os.PathLike | None):
            raise ValueError(f"tuned_file must be a path, got {self.tuned_file!r}")
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
        return str(self.wire_dtype) in CODED_DTYPES or self.compress is not None

    @property
    def _asks_for_codes(self) -> str:
        return "compress=" if self.compress is not None else f"wire_dtype={self.wire_dtype}"

    @property
    def trains_as_plain(self) -> bool:
        """Whether plain DDP would train with the same gradients and state, and so may go on from a copy."""
        return self.wire_dtype is None and self.compress is None and not self.weighted and not self.shard_optimizer

    @property
    def leaves_the_choice(self) -> bool:
        """Whether DDP may train as it was before attach if that is as fast, because nothing says what to do instead."""
        is_searched = self.schedule is Schedule.AUTO and self.fusion_mb is None
        return is_searched and self.trains_as_plain and not self.strict and self.groups is None

    def shared_by_ranks(self) -> dict[str, object]:
        """Return the options in which all ranks must agree, as JSON values."""
        return {each.name: _as_json(getattr(self, each.name)) for each in fields(self) if not each.metadata} | {
            "tuned_file": self.tuned_file is not None
        }

    def of_the_plan(self) -> dict[str, object]:
        """Return the options on which the best plan may depend, as JSON values, unless they are as by default."""
        default = Options().shared_by_ranks()
        given = {name: value for name, value in self.shared_by_ranks().items() if value != default[name]}
        return {name: value for name, value in given.items() if name not in ("tune", "tuned_file")}


def _as_json(value: object) -> object:
    if isinstance(value, TopK):
        return asdict(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
