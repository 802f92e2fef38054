"""The settings of one case, and what its arms train."""

import dataclasses

from bench_kit import paced
from bench_kit.training import Workload, paced_workload
from bench_parts import real


@dataclasses.dataclass(frozen=True)
class CaseSettings:
    """One workload, measured with all arms in the same processes.

    Attributes:
        workload: `paced`, or one of the names in `real.MODELS`.
        arms: arms as on the command line, with the bucket sweep written out; `noop` is among them.
        rounds: turns that each arm takes.
        steps: timed steps of a turn.
        ratio: A/C to set for `paced`; None for real compute.
        blocks: blocks of `paced`; the units that FSDP2 shards.
        weights_per_block: paced weights in a block.
        parameters: elements of all weights of `paced` together.
        profile: `uniform` or `heavy-end`, see `paced.layer_sizes`.
        tokens: tokens in a batch of `transformer`.
        fusion_mb: passed to `DearState` where given.
        optimizer: of all arms, a name in `arms.OPTIMIZERS`.
        straggler: which ranks of `paced` are slow, as `stragglers.Straggler.parse` reads it; None: none.
        warm_up_limit: steps after which an arm of ours counts as never settled.
    """

    workload: str
    arms: tuple[str, ...]
    rounds: int
    steps: int
    ratio: float | None = None
    blocks: int = 8
    weights_per_block: int = 4
    parameters: int = 10_000_000
    profile: str = "uniform"
    tokens: int = 320
    fusion_mb: float | None = None
    optimizer: str = "sgd"
    straggler: str | None = None
    warm_up_limit: int = 180

    @property
    def name(self) -> str:
        if self.workload != "paced":
            return f"transformer, {self.tokens} tokens" if self.workload == "transformer" else self.workload
        slow = f", {self.straggler}" if self.straggler else ""
        return f"paced, {self.profile}, A/C {self.ratio:g}{slow}"


def make_workload(settings: CaseSettings) -> Workload:
    """The workload of a case; paced layers do not sleep until their pace is set."""
    if settings.workload != "paced":
        return real.MODELS[settings.workload](settings.tokens)
    pace = paced.Pace(0.0)
    layers = settings.blocks * settings.weights_per_block
    sizes = paced.layer_sizes(settings.parameters, layers, settings.profile)
    return paced_workload(sizes, settings.blocks, pace)
