"""The cases by name. Times are those of a device and a link of one's own."""

import argparse
import dataclasses

from bench_lease_parts.settings import CaseSettings, JobSettings

# T is about 1.33 c: most of the gradients come last and are needed first, so the link is waited for under any schedule.
# Both links together take two thirds of one compute, so they do not bind.
TRAINING = JobSettings("a", "training", compute_s=0.3, link_s=0.085, first_layer_share=0.9)
COMMUNICATION_BOUND = JobSettings("a", "training", compute_s=0.1, link_s=0.2)
COMPUTE_BOUND = JobSettings("b", "compute", compute_s=0.1, layers=24)
# Kernels of 1.5 and 3 ms: what the main job waits for at most when it wants the device back.
FILLER = JobSettings("filler", "compute", compute_s=0.054, layers=12, role="filler")


def _named(job: JobSettings, *names: str) -> tuple[JobSettings, ...]:
    return tuple(dataclasses.replace(job, name=name) for name in names)


JOBS: dict[str, tuple[JobSettings, ...]] = {
    "equal": _named(TRAINING, "a", "b"),
    "unequal": (COMMUNICATION_BOUND, COMPUTE_BOUND),
    "embedding": (dataclasses.replace(COMMUNICATION_BOUND, first_layer_share=0.9), COMPUTE_BOUND),
    "filler": (TRAINING, FILLER),
    "opposite": _named(TRAINING, "a", "b"),
    "three": _named(TRAINING, "a", "b", "c"),
    "weights": (
        dataclasses.replace(COMPUTE_BOUND, name="a", weight=1.0),
        dataclasses.replace(COMPUTE_BOUND, name="b", weight=4.0),
    ),
}
MEANING = {
    "equal": "two equal training jobs, T about 1.33 c, link not binding",
    "unequal": "a training job with A/C = 2, and one that only computes",
    "embedding": "as unequal, with 90% of the gradients in the first layer",
    "filler": "a training job with T about 1.33 c, and an endless filler",
    "opposite": "as equal, but jobs arrive in opposite order on the two hosts",
    "three": "three equal training jobs",
    "weights": "two jobs that only compute, with weights 1 and 4",
}
STAGGER_S = {"opposite": 0.1}


def make_case(name: str, args: argparse.Namespace) -> CaseSettings:
    """The case with what the command line says of measuring."""
    return CaseSettings(
        name=name,
        jobs=JOBS[name],
        rounds=args.rounds,
        window_s=args.window_s,
        settle_s=args.settle_s,
        slice_s=args.slice_ms / 1e3,
        switch_s=args.switch_us / 1e6,
        stagger_s=STAGGER_S.get(name, 0.0),
        schedule=args.schedule,
    )
