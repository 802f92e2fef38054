"""What both runs of a soak share; ranks read it from a JSON file. Pure."""

import dataclasses
import json
from pathlib import Path

WORLD_SIZE = 2
LONGEST_INTERVAL_STEPS = 500
# So that each quarter of a short run has ten samples, too.
LEAST_SAMPLES = 40


@dataclasses.dataclass(frozen=True)
class SoakSettings:
    """One soak.

    Attributes:
        steps: training steps of each run.
        directory: where the lease, checkpoints and figures are.
        watched: process ids by name, of processes whose figures rank 0 takes beside its own.
    """

    steps: int
    directory: str
    watched: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def sample_every(self) -> int:
        """Steps between evaluations; figures are taken after each."""
        return max(1, min(LONGEST_INTERVAL_STEPS, self.steps // LEAST_SAMPLES))

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints. Every third time the last one is loaded, and none is saved."""
        return 2 * self.sample_every

    @property
    def attach_every(self) -> int:
        """Steps after which the package is detached and attached anew, with other options."""
        return 5 * self.sample_every

    @property
    def checkpoint(self) -> Path:
        return Path(self.directory, "checkpoint.pt")

    def samples(self, arm: str, rank: int) -> Path:
        """The file to which a rank adds a line for each sample."""
        return Path(self.directory, f"{arm}-{rank}.jsonl")

    def result(self, arm: str, rank: int) -> Path:
        """The file that a rank writes at its end."""
        return Path(self.directory, f"{arm}-{rank}.json")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "SoakSettings":
        return cls(**json.loads(path.read_text()))
