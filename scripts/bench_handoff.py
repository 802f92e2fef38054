"""Measure the steps of the lease: hand-offs, free turns, reading contended, dead and stopped holders, fairness.

    python scripts/bench_handoff.py
    python scripts/bench_handoff.py --rounds 10 --keep-awake --json handoff.json

Brokers and clients are real processes, started afresh in every round. The measurements take turns, round by round, so
that a slow moment of the machine hits them all. A hand-off lasts from the call of the holder's release to the return
of the waiting client's acquire, by the clock that all processes of a host share. The bare relay shows what the machine
takes to pass a message on through a third process, as the broker would: two wake-ups. Jobs that hand over to each other
need one. On a virtual machine most of it is waking a core that sleeps; with --keep-awake no core does. Needs no GPU and
no torch.
"""

import os
import statistics
import subprocess
import sys
from contextlib import ExitStack

from bench_handoff_parts.measure import AFTER_KILL, AFTER_STOP, CONTENDED, HAND_OFF, HEAVY, JAIN, measure_round
from bench_kit import record
from bench_kit.options import add_results, make_parser, positive, positive_int
from bench_kit.rounds import quantile

TARGETS = {
    HAND_OFF: "<= 60 / <= 150",
    CONTENDED: "<= 2",
    AFTER_KILL: "p99 <= 10",
    AFTER_STOP: "<= 1000",
    **{JAIN.format(n): ">= 0.99" for n in (2, 3, 4)},
    HEAVY: "0.76 .. 0.84",
}


def keep_awake(stack: ExitStack) -> None:
    """Start a process on each core that computes whenever no other process wants the core."""
    for core in os.sched_getaffinity(0):
        spin = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10_000))"
        process = stack.enter_context(subprocess.Popen([sys.executable, "-I", "-S", "-c", spin]))
        stack.callback(process.kill)
        os.sched_setaffinity(process.pid, [core])
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))


def summary(samples: list[float]) -> dict[str, float]:
    """The figures of one measurement in one round."""
    return {"samples": len(samples), "p50": statistics.median(samples), "p99": quantile(samples, 0.99)}


def print_results(rounds: list[dict[str, list[float]]]) -> None:
    """Print a row for each measurement: the median over rounds, and the lowest and highest round."""
    print(f"{'':28} {'p50':>9} {'(rounds)':>20} {'p99':>9} {'(rounds)':>20}   target")
    for name in rounds[0]:
        row = f"{name:28}"
        for which in ("p50", "p99"):
            figures = [summary(samples[name])[which] for samples in rounds]
            many = len(rounds[0][name]) > 1 or which == "p50"
            spread = f"{min(figures):.4g} .. {max(figures):.4g}"
            row += f" {statistics.median(figures):9.4g} {spread:>20}" if many else f" {'':30}"
        print(f"{row}   {TARGETS.get(name, '')}")


def main() -> None:
    """Measure round by round, print, and write the file that `--json` asks for."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=positive_int, default=5, help="how often everything is measured (%(default)s)")
    add("--turns", type=positive_int, default=1000, help="turns of each client in each round (%(default)s)")
    add("--hold-ms", type=positive, default=1.0, help="length of a turn (%(default)s)")
    add("--kills", type=positive_int, default=20, help="holders killed in each round (%(default)s)")
    add("--stops", type=positive_int, default=3, help="holders stopped in each round (%(default)s)")
    add("--share-s", type=positive, default=1.0, help="how long jobs compete for their shares (%(default)s)")
    add("--keep-awake", action="store_true", help="let no core sleep, with idle-priority processes")
    add_results(parser)
    args = parser.parse_args()
    config = record.configuration(args)
    record.show_configuration(config)
    with ExitStack() as stack:
        if args.keep_awake:
            keep_awake(stack)
        rounds = [measure_round(args) for _ in range(args.rounds)]
    print_results(rounds)
    figures = {name: [summary(samples[name]) for samples in rounds] for name in rounds[0]}
    record.write({"configuration": config, "rounds": figures}, args.json)


if __name__ == "__main__":
    main()
