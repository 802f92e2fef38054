"""The command line of `accuracy.py`."""

import argparse
import importlib.util
from pathlib import Path

from accuracy_parts.tasks import TASKS
from accuracy_parts.wires import DEFAULT_WIRES, REFERENCE, WIRES
from bench_kit.options import make_parser, names, positive, positive_int

_TASK_LINES = [f"  {task.name:12}{task.title}; {task.steps} steps; {task.optimizer}" for task in TASKS.values()]
_WIRE_LINES = [f"  {wire.name:12}{wire.label}" for wire in WIRES.values()]
EPILOG = "\n".join(["tasks:", *_TASK_LINES, "wires:", *_WIRE_LINES])


def parse_args(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Read and check the command line; bad input ends the program with a message that names it."""
    parser = make_parser(description, EPILOG)
    what = parser.add_argument_group("what is trained")
    # fmt: off
    add = what.add_argument
    add("--tasks", type=names(list(TASKS)), default=list(TASKS), metavar="TASK,...",
        help=f"listed below ({','.join(TASKS)})")
    add("--wires", type=names(list(WIRES)), default=DEFAULT_WIRES, metavar="WIRE,...",
        help=f"listed below; all are compared with {REFERENCE} if it is among them ({','.join(DEFAULT_WIRES)})")
    add("--seeds", type=positive_int, default=3, metavar="N",
        help="train each wire so many times, with the seeds 0, 1, ... (%(default)s)")
    add("--steps", type=positive_int, metavar="N", help="steps of each training, instead of the task's own")
    add("--ranks", type=positive_int, default=2, metavar="N",
        help="processes of this machine; batches per rank keep their size (%(default)s)")
    add("--fusion-mb", type=positive, default=0.25, metavar="MB",
        help="MiB of a fusion group (%(default)s; with --rate it is tuned)")
    add = parser.add_argument_group("held-out loss over time").add_argument
    add("--evaluate-every", type=positive_int, metavar="N",
        help="take the loss on test data after every N steps, while the clock stands still")
    add("--rate", metavar="RATE",
        help="put each rank on a host of a lab that sends at most this fast, such as 100mbit; needs root")
    add("--delay-ms", type=positive, metavar="MS", help="with --rate: each packet arrives this much later (no delay)")
    add = parser.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="FILE", help="file for all figures and curves; written after each case")
    add("--png", type=Path, metavar="FILE", help="file for one picture of all curves; needs matplotlib")
    add("--curves", type=Path, metavar="FILE",
        help="file for held-out loss over time and over samples; needs --evaluate-every and matplotlib")
    add("--from-json", type=Path, metavar="FILE", help="train nothing: show what --json has written")
    # fmt: on
    args = parser.parse_args(arguments)
    if (args.png or args.curves) and importlib.util.find_spec("matplotlib") is None:
        parser.error("pictures need matplotlib: pip install matplotlib")
    if args.delay_ms and not args.rate:
        parser.error("--delay-ms is that of a lab: give --rate as well")
    if args.curves and not args.evaluate_every and not args.from_json:
        parser.error("--curves draws what --evaluate-every measures: give both")
    if args.from_json:
        _check_alone(parser, args)
    return args


def _check_alone(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse, beside `--from-json`, what would have no effect."""
    others = set(vars(args)) - {"from_json", "png", "curves"}
    for name in sorted(name for name in others if getattr(args, name) != parser.get_default(name)):
        parser.error(f"--{name.replace('_', '-')} has no effect with --from-json: leave it out")
    if not args.from_json.is_file():
        parser.error(f"--from-json {args.from_json}: no such file")
