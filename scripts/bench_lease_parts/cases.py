"""What is measured: jobs, the cases by name, and the command line. Hosts and jobs read a case from a file."""

import argparse
import dataclasses
import pickle
from pathlib import Path
from typing import Literal

from bench_kit.options import add_link_options, add_results, make_parser, names, parse, positive, positive_int

_FILE = "settings.pickle"


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """One job, with a rank on every host.

    Attributes:
        name: unique within the case.
        compute_s: time of a step's compute alone; a third of it is forward.
        link_s: time that the link alone would take for a step's gradients, which says how many parameters there are.
            0: the job uses the device only, each rank for itself.
        layers: paced layers, which all take equally long.
        first_layer_share: share of the parameters that the first layer holds, as an embedding would: their gradient
            comes last and they are needed first, so no schedule hides it. None: all layers hold equally many.
        weight: of its lease.
        role: of its lease, `peer` or `filler`.
    """

    name: str
    compute_s: float
    link_s: float = 0.0
    layers: int = 8
    first_layer_share: float | None = None
    weight: float = 1.0
    role: Literal["peer", "filler"] = "peer"

    @property
    def trains(self) -> bool:
        """Whether it synchronizes gradients."""
        return self.link_s > 0


@dataclasses.dataclass(frozen=True)
class CaseSettings:
    """Some jobs that share all hosts, and how they are measured.

    Attributes:
        name: as on the command line.
        jobs: the first one is the main job where there are fillers.
        rounds: windows of each arm.
        window_s: length of a window.
        settle_s: how long the jobs run before a window begins.
        stagger_s: jobs start so long after each other, in opposite orders on hosts of even and of odd number.
        rehearsed_steps: how many steps they make together before they are measured. Beside another job, steps with the
            lease are compared with some without it before it is known whether it pays.
    """

    name: str
    jobs: tuple[JobSettings, ...]
    rounds: int
    window_s: float
    settle_s: float
    stagger_s: float = 0.0
    rehearsed_steps: int = 0

    def start_delay_s(self, job: int, host: int) -> float:
        """How long after the first job this one starts on this host."""
        return self.stagger_s * (job if host % 2 == 0 else len(self.jobs) - 1 - job)

    def write(self, directory: Path) -> None:
        (directory / _FILE).write_bytes(pickle.dumps(self))

    @staticmethod
    def read(directory: Path) -> "CaseSettings":
        settings: CaseSettings = pickle.loads((directory / _FILE).read_bytes())
        return settings


# T is about 1.33 c: most of the gradients come last and are needed first, so the link is waited for under any schedule.
# Both links together take two thirds of one compute, so they do not bind.
TRAINING = JobSettings("a", compute_s=0.3, link_s=0.085, first_layer_share=0.9)
COMPUTE_BOUND = JobSettings("b", compute_s=0.1, layers=24)
# Kernels of 1.5 and 3 ms: what the main job waits for at most when it wants the device back.
FILLER = JobSettings("filler", compute_s=0.054, layers=12, role="filler")


def _like(job: JobSettings, *names: str) -> tuple[JobSettings, ...]:
    return tuple(dataclasses.replace(job, name=name) for name in names)


JOBS: dict[str, tuple[JobSettings, ...]] = {
    "equal": _like(TRAINING, "a", "b"),
    "unequal": (JobSettings("a", compute_s=0.1, link_s=0.2), COMPUTE_BOUND),
    "filler": (TRAINING, FILLER),
    "opposite": _like(TRAINING, "a", "b"),
    "three": _like(TRAINING, "a", "b", "c"),
    "weights": (*_like(COMPUTE_BOUND, "a"), dataclasses.replace(COMPUTE_BOUND, weight=4.0)),
}
MEANING = {
    "equal": "two equal training jobs, T about 1.33 c, link not binding",
    "unequal": "a training job with A/C = 2, and one that only computes",
    "filler": "a training job with T about 1.33 c, and an endless filler",
    "opposite": "as equal, but jobs arrive in opposite order on the two hosts",
    "three": "three equal training jobs",
    "weights": "two jobs that only compute, with weights 1 and 4",
}


def make_case(name: str, args: argparse.Namespace) -> CaseSettings:
    """The case with what the command line says of measuring."""
    stagger_s = 0.1 if name == "opposite" else 0.0
    return CaseSettings(name, JOBS[name], args.rounds, args.window_s, args.settle_s, stagger_s, args.rehearse)


def parse_args(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Read and check the command line; bad input ends the program with a message that names it."""
    cases = "\n".join(f"  {name:10}{meaning}" for name, meaning in MEANING.items())
    parser = make_parser(description, f"cases:\n{cases}")
    # fmt: off
    add = parser.add_argument
    add("--cases", type=names(list(JOBS)), default=list(JOBS), metavar="NAME,...", help="listed below (all)")
    add_link_options(parser)
    add("--rounds", type=positive_int, default=5, help="windows of each arm (%(default)s)")
    add("--window-s", type=positive, default=8.0, help="length of a window (%(default)g)")
    add("--settle-s", type=positive, default=1.5, help="how long jobs run before a window begins (%(default)g)")
    add("--rehearse", type=positive_int, default=50, help="steps that all make together before (%(default)s)")
    add("--quick", action="store_true", help="a first look: 2 rounds of 4 s, unless given")
    # fmt: on
    add_results(parser)
    return parse(parser, arguments, {"rounds": 2, "window_s": 4.0})
