"""The settings of one case, and the arms that take part in it."""

import dataclasses
from typing import NamedTuple

DEFAULT_BUCKET_MB = 25.0
# Of the arm that shows what the pipeline costs where nothing is to be sent, if the arm `auto` has found no size.
USUAL_FUSION_MB = 8.0

NOOP, AUTO, DDP_NO_WIRE, DEAR_NO_WIRE = "noop", "auto", "ddp, no wire", "dear, no wire"
MEANING = {
    NOOP: "DDP without communication (torch's noop_hook): compute alone",
    "ddp@MB": "plain DDP with this bucket_cap_mb; its all-reduces run on a stream of their own and overlap backward",
    AUTO: 'ddp_crossover, schedule="auto", tuned by itself',
    DDP_NO_WIRE: "plain DDP on a wire that takes no time: what its hook costs",
    DEAR_NO_WIRE: "the pipeline on such a wire, in the groups that auto has found: what it costs",
}
WHY_NOT_FSDP2 = (
    "fsdp2 cannot be treated alike on one GPU: with one rank, torch's fully_shard skips its all-gather and its "
    "reduce-scatter and shards nothing, so a wire put into it would carry what it does not send"
)


class ArmSettings(NamedTuple):
    """One way of training.

    Attributes:
        name: as in the table.
        bucket_mb: DDP's `bucket_cap_mb`.
        is_ours: whether `ddp_crossover` is attached.
        communicates: whether gradients are reduced at all.
        has_wire: whether the wire takes time.
    """

    name: str
    bucket_mb: float = DEFAULT_BUCKET_MB
    is_ours: bool = False
    communicates: bool = True
    has_wire: bool = True


@dataclasses.dataclass(frozen=True)
class CaseSettings:
    """One model on one wire, with all arms in one process.

    Attributes:
        model: a name in `workloads.MODELS`.
        gbit_per_s: what each rank of the ring can send.
        ranks: how many ranks the ring has.
        latency_s: of each reduce-scatter and all-gather.
        buckets_mb: sizes of plain DDP's buckets.
        rounds: turns that each arm takes, if time allows.
        steps: timed steps of a turn.
        precision: `bf16` for autocast to bfloat16, or `fp32`.
        optimizer: `sgd` or `adamw`.
        batch: batch size; None for that of the model.
        limit_s: no round begins that would end later than this after the case began.
        timeline: file for a picture of some steps of plain DDP and of ours; empty for none.
        warm_up_limit: steps after which an arm of ours counts as never settled.
    """

    model: str
    gbit_per_s: float
    ranks: int = 4
    latency_s: float = 20e-6
    buckets_mb: tuple[float, ...] = (DEFAULT_BUCKET_MB, 8.0, 2.0)
    rounds: int = 12
    steps: int = 5
    precision: str = "bf16"
    optimizer: str = "sgd"
    batch: int | None = None
    limit_s: float = 200.0
    timeline: str = ""
    warm_up_limit: int = 200

    @property
    def name(self) -> str:
        return f"{self.model}, {self.gbit_per_s:g} Gb/s"

    def arms(self) -> list[ArmSettings]:
        """All arms, in the order of the table."""
        return [
            ArmSettings(NOOP, communicates=False),
            *(ArmSettings(f"ddp@{size:g}", size) for size in self.buckets_mb),
            ArmSettings(AUTO, is_ours=True),
            ArmSettings(DDP_NO_WIRE, has_wire=False),
            ArmSettings(DEAR_NO_WIRE, is_ours=True, has_wire=False),
        ]
