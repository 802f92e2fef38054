"""The settings of one case, which hosts and jobs read from a file."""

import dataclasses
import pickle
from pathlib import Path
from typing import Literal

_FILE = "settings.pickle"


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """One job, with a rank on every host.

    Attributes:
        name: unique within the case.
        kind: `training` synchronizes its gradients; `compute` uses the device only, each rank for itself.
        compute_s: time of a step's compute alone; a third of it is forward.
        link_s: time that the link alone would take for a step's gradients, which says how many parameters there are.
        layers: paced layers, which all take equally long.
        first_layer_share: share of the parameters that the first layer holds, as an embedding would: their gradient
            comes last and they are needed first, so no schedule hides it. None: all layers hold equally many.
        weight: of its lease.
        role: of its lease, `peer` or `filler`.
    """

    name: str
    kind: Literal["training", "compute"]
    compute_s: float
    link_s: float = 0.0
    layers: int = 8
    first_layer_share: float | None = None
    weight: float = 1.0
    role: Literal["peer", "filler"] = "peer"


@dataclasses.dataclass(frozen=True)
class CaseSettings:
    """Some jobs that share all hosts, and how they are measured.

    Attributes:
        name: as on the command line.
        jobs: the first one is the main job where there are fillers.
        rounds: windows of each arm.
        window_s: length of a window.
        settle_s: how long the jobs run before a window begins.
        slice_s: time slice of the emulated device.
        switch_s: what it costs the emulated device to go from one job to another.
        stagger_s: jobs start so long after each other, in opposite orders on hosts of even and of odd number.
        schedule: of the training jobs' `DearState`.
    """

    name: str
    jobs: tuple[JobSettings, ...]
    rounds: int
    window_s: float
    settle_s: float
    slice_s: float
    switch_s: float
    stagger_s: float = 0.0
    schedule: str = "dear"

    def start_delay_s(self, job: int, host: int) -> float:
        """How long after the first job this one starts on this host."""
        place = job if host % 2 == 0 else len(self.jobs) - 1 - job
        return place * self.stagger_s

    def write(self, directory: Path) -> None:
        """Write the settings to a file in a directory."""
        (directory / _FILE).write_bytes(pickle.dumps(self))

    @staticmethod
    def read(directory: Path) -> "CaseSettings":
        """Read what `write` wrote."""
        settings: CaseSettings = pickle.loads((directory / _FILE).read_bytes())
        return settings
