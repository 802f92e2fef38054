"""The settings of one measurement of memory, which its ranks read from a JSON file."""

import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class MemorySettings:
    """One arm on so many fresh ranks.

    Attributes:
        arm: the arm, as on the command line.
        ranks: number of ranks.
        optimizer: a name in `bench_parts.arms.OPTIMIZERS`.
        layers: blocks of the network, each a linear layer and a ReLU; the units that FSDP2 shards.
        width: inputs and outputs of each linear layer.
        rows: rows of a batch.
        steps: steps after those that warm up and tune.
        warm_up_limit: steps after which an arm of ours counts as never settled.
    """

    arm: str
    ranks: int
    optimizer: str
    layers: int
    width: int
    rows: int
    steps: int
    warm_up_limit: int = 150

    @property
    def name(self) -> str:
        """The measurement in one short phrase."""
        return f"{self.arm} on {self.ranks} ranks"

    def write(self, path: Path) -> None:
        """Write the settings to a file."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "MemorySettings":
        """Read what `write` wrote."""
        return cls(**json.loads(path.read_text()))
