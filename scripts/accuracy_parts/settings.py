"""The settings of one case."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CaseSettings:
    """One wire on one task, with all seeds.

    Attributes:
        task: a name in `tasks.TASKS`.
        wire: a name in `wires.WIRES`.
        ranks: number of ranks.
        seeds: number of seeds, which are 0, 1, and so on.
        steps: steps of training with each seed.
        fusion_mb: size of a fusion group in MiB; None has it tuned.
        evaluate_every: steps from one evaluation on test data to the next; None: only at the end.
    """

    task: str
    wire: str
    ranks: int
    seeds: int
    steps: int
    fusion_mb: float | None
    evaluate_every: int | None = None

    @property
    def name(self) -> str:
        """The case in one short phrase."""
        return f"{self.task}, {self.wire}"
