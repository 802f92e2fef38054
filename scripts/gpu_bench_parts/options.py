"""The command line of `gpu_bench.py`, and the cases that it asks for."""

import argparse
from pathlib import Path

from bench_kit.options import add_results, make_parser, names, not_negative, positive, positive_int, positive_numbers
from gpu_bench_parts.settings import MEANING, CaseSettings
from gpu_bench_parts.workloads import MODELS, SMALL

ARMS = "\n".join(f"  {name:16}{meaning}" for name, meaning in MEANING.items())
EPILOG = f"arms:\n{ARMS}"
ON_GPU = {"models": [name for name in MODELS if name != SMALL], "gbit": [25.0, 10.0]}
# So slow that the wire counts against the compute of a processor.
REHEARSAL = {"models": [SMALL], "gbit": [2.0]}


def parse_args(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Read and check the command line; bad input ends the program with a message that names it."""
    parser = make_parser(description, EPILOG)
    # fmt: off
    add = parser.add_argument_group("what is measured").add_argument
    add("--models", type=names(list(MODELS)), metavar="NAME,...",
        help=f"{', '.join(MODELS)} (all but {SMALL}; in a rehearsal {SMALL})")
    add("--gbit", type=positive_numbers, metavar="GB/S,...", help="speeds of the emulated wire in Gb/s (25,10)")
    add("--ranks", type=int, choices=range(2, 1025), default=4, metavar="N",
        help="ranks whose ring the wire emulates; sums are exact for powers of two (%(default)s)")
    add("--latency-us", type=not_negative, default=20.0,
        help="added for each reduce-scatter and all-gather (%(default)g)")
    add("--buckets", type=positive_numbers, default=[25.0, 8.0, 2.0], metavar="MB,...",
        help="bucket_cap_mb of plain DDP, each an arm (25,8,2)")
    add("--precision", choices=("bf16", "fp32"), default="bf16", help="bf16: autocast (%(default)s)")
    add("--optimizer", choices=("sgd", "adamw"), default="sgd", help="(%(default)s)")
    add("--batch", type=positive_int, help="batch size (that of each model)")
    add = parser.add_argument_group("how").add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu: a rehearsal with a small model, which says nothing about a GPU (%(default)s)")
    add("--rounds", type=positive_int, default=12, help="turns of each arm, if time allows (%(default)s)")
    add("--steps-per-round", type=positive_int, default=5, help="timed steps of a turn (%(default)s)")
    add("--case-s", type=positive, default=200.0, help="no round begins that would end later (%(default)g)")
    # fmt: on
    add_results(parser)
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="picture of some steps, PNG; one for each case; needs matplotlib"
    )
    args = parser.parse_args(arguments)
    usual = ON_GPU if args.device == "cuda" else REHEARSAL
    args.models, args.gbit = args.models or usual["models"], args.gbit or usual["gbit"]
    return args


def make_cases(args: argparse.Namespace) -> list[CaseSettings]:
    """One case for each model and speed; all models at one speed first."""
    return [
        CaseSettings(
            model=model,
            gbit_per_s=gbit_per_s,
            ranks=args.ranks,
            latency_s=args.latency_us / 1e6,
            buckets_mb=tuple(args.buckets),
            rounds=args.rounds,
            steps=args.steps_per_round,
            precision=args.precision,
            optimizer=args.optimizer,
            batch=args.batch,
            limit_s=args.case_s,
            timeline=_picture(args.timeline, model, gbit_per_s),
        )
        for gbit_per_s in args.gbit
        for model in args.models
    ]


def _picture(path: Path | None, model: str, gbit_per_s: float) -> str:
    if path is None:
        return ""
    return str(path.resolve().with_name(f"{path.stem}-{model}-{gbit_per_s:g}g{path.suffix or '.png'}"))
