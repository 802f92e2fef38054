"""Long runs: `python -m tests.fuzz --seed 7 --programs 500 --ranks 2 --only shard_optimizer=true --json found.json`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "support")]

from .campaign import Report, campaign  # noqa: E402
from .pairs import ANY, Meetings, Wanted  # noqa: E402
from .pool import FuzzPool  # noqa: E402
from .program import Program  # noqa: E402


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first seed (the clock)")
    parser.add_argument("--programs", type=int, default=300, help="how many (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="world size (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many (never)")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="KEY[=VALUE]",
        help="what every program has, as shard_optimizer=true, the event frozen, or any habit; may be repeated",
    )
    parser.add_argument(
        "--least", type=int, default=0, metavar="N", help="draw for pairs of features until each has met N times"
    )
    parser.add_argument(
        "--after",
        nargs="+",
        default=[],
        metavar="FILE",
        help="count pairs of earlier campaigns, too, from their --json",
    )
    parser.add_argument("--tuned", action="store_true", help="nothing is set: the tuner runs, in 110 steps")
    parser.add_argument("--no-shrink", action="store_true", help="show failures as they were drawn")
    parser.add_argument("--program", metavar="FILE", help="run the program in this file, or '-' for standard input")
    parser.add_argument("--json", metavar="FILE", help="write counts, failures and pairs")
    parsed = parser.parse_args(arguments)
    try:
        parsed.wanted = Wanted.of(dict(map(value_of, parsed.only)))
    except ValueError as error:
        parser.error(f"--only: {error}")
    return parsed


def value_of(text: str) -> tuple[str, Any]:
    """`key=value`, where the value is JSON or else a string, or a key alone."""
    key, has_value, value = text.partition("=")
    if not has_value:
        return key, ANY
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def show(report: Report) -> None:
    """One line, over the last one on a terminal."""
    if sys.stderr.isatty() or report.programs % 25 == 0:
        rate = report.programs / report.seconds if report.seconds else 0.0
        end = "\r" if sys.stderr.isatty() else "\n"
        line = f"{report.programs} programs, {rate:.2f} a second, {len(report.failures)} failed"
        print(line, end=end, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 if a program has failed."""
    args = parse(arguments)
    if args.program:
        text = sys.stdin.read() if args.program == "-" else Path(args.program).read_text()
        program = Program.from_json(text)
        with FuzzPool(program.ranks) as pool:
            outcome = pool.judge(program)
        print(outcome.failure or dict(outcome.counts))
        return bool(outcome.failure)
    shown = 0

    def on_progress(report: Report) -> None:
        nonlocal shown
        show(report)
        for failure in report.failures[shown:]:
            print(f"\nFAILED\n{failure.program.to_json()}\n{failure.detail}\n", flush=True)
        shown = len(report.failures)
        if args.json:
            Path(args.json).write_text(to_json(report, args))

    with FuzzPool(args.ranks) as pool:
        report = campaign(
            pool,
            first_seed=args.seed,
            count=args.programs,
            wanted=args.wanted,
            meetings=Meetings(args.after),
            least=args.least,
            tuned=args.tuned,
            shrinks=not args.no_shrink,
            on_progress=on_progress,
            seconds=args.seconds,
        )
    print(f"seed {args.seed}, {args.ranks} ranks: {report.programs} programs in {report.seconds:.0f} s, by arms:")
    for kind, count in sorted(report.counts.items(), key=lambda item: -item[1]):
        print(f"{count:6d}  {kind}")
    print(report.meetings.summary(args.least or 30))
    return bool(report.failures)


def to_json(report: Report, args: argparse.Namespace) -> str:
    """All that was found."""
    return json.dumps(
        {
            "seed": args.seed,
            "ranks": args.ranks,
            "programs": report.programs,
            "seconds": round(report.seconds, 1),
            "counts": dict(report.counts),
            "failures": [
                {"program": json.loads(failure.program.to_json()), "detail": failure.detail}
                for failure in report.failures
            ],
            "pairs": [[*pair, count] for pair, count in report.meetings.counts.most_common()],
        },
        indent=1,
    )


if __name__ == "__main__":
    sys.exit(main())
