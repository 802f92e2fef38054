"""Measure two jobs on two hosts: do they take turns in the same order on both, and how soon?

    python scripts/bench_two_hosts.py
    python scripts/bench_two_hosts.py --steps 200 --rounds 5 --json two_hosts.json

Each "host" is a directory with a broker of its own; the brokers know nothing of each other. Each job has one rank on
each host. A step takes its turn to compute (a sleep: the GPU is busy, the host is not), exchanges a message with the
rank on the other host, communicates (a sleep), and begins again. One of the ranks of each job may be late by itself in
every step, as with a slow data loader: job a's on the second host, job b's on the first. Left alone,
that keeps an opposite order going for ever. Needs no GPU and no torch.
"""

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench_kit import record
from bench_kit.lease_processes import Program, start_broker
from bench_kit.options import add_results, make_parser, positive_int

RANK = Path(__file__).resolve().parent / "bench_two_hosts_parts" / "rank.py"
HOSTS = (0, 1)
JOBS = "ab"
# From when all ranks are ready until the first of them begins.
START_S = 0.1


class Case(NamedTuple):
    """Two equal jobs. Seconds of computing and of communicating, and how late a rank is by itself."""

    compute_s: float
    link_s: float
    late_s: float


CASES = (Case(0.02, 0.02, 0.002), Case(0.02, 0.03, 0.002), Case(0.02, 0.01, 0.002), Case(0.1, 0.1, 0.01))


class Outcome(NamedTuple):
    """For each step, who computed first on each host; and steps of both jobs per second."""

    orders: list[tuple[str, ...]]
    steps_per_s: float

    @property
    def same_from(self) -> int:
        """The first step from which on the order is the same on both hosts."""
        differing = [step for step, order in enumerate(self.orders) if len(set(order)) > 1]
        return max(differing, default=-1) + 1


def run(case: Case, steps: int, opposite: bool) -> Outcome:
    """Run both jobs. With ``opposite``, job b is the first to ask on the second host."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lease-")))
        for host in HOSTS:
            start_broker(root / str(host), stack)
        places = [(job, host) for job in JOBS for host in HOSTS]
        ranks = {place: Program(stack, RANK, _arguments(root, case, steps, opposite, *place)) for place in places}
        for rank in ranks.values():
            rank.wait_until_ready()
        start_s = time.monotonic() + START_S
        for rank in ranks.values():
            rank.tell(start_s)
        answers = {place: rank.answer() for place, rank in ranks.items()}
    orders = [
        tuple("".join(sorted(JOBS, key=lambda job: answers[job, host][0][step])) for host in HOSTS)
        for step in range(steps)
    ]
    seconds = max(ended_s for _, ended_s in answers.values()) - start_s
    return Outcome(orders, len(JOBS) * steps / seconds)


def _arguments(root: Path, case: Case, steps: int, opposite: bool, job: str, host: int) -> list[Any]:
    """The arguments of one rank."""
    leads = (job == JOBS[0]) == (host == 0 or not opposite)
    late_s = case.late_s if (job == JOBS[0]) == (host == 1) else 0.0
    ends = [str(root / f"{job}{which}") for which in (host, 1 - host)]
    delay_s = 0.0 if leads else 0.5 * case.compute_s + case.late_s
    return [*ends, str(root / str(host)), job, steps, case.compute_s, case.link_s, late_s, delay_s]


def main() -> None:
    """Measure each case in the same and in opposite order by turns, print, and write the file of `--json`."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=positive_int, default=60, help="steps of each job (%(default)s)")
    parser.add_argument("--rounds", type=positive_int, default=3, help="how often each case is measured (%(default)s)")
    add_results(parser)
    args = parser.parse_args()
    config = record.configuration(args)
    record.show_configuration(config)
    print("compute, link, late ms    steps/s: same order from the start, opposite    ratio    same from step")
    results = []
    for case in CASES:
        pairs = [(run(case, args.steps, False), run(case, args.steps, True)) for _ in range(args.rounds)]
        same, opposite = (statistics.median(pair[i].steps_per_s for pair in pairs) for i in (0, 1))
        ratios = [pair[1].steps_per_s / pair[0].steps_per_s for pair in pairs]
        same_from = [pair[1].same_from for pair in pairs]
        times = ", ".join(f"{1e3 * seconds:g}" for seconds in case)
        print(
            f"{times:24}  {same:10.1f} {opposite:10.1f}  {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} .. {max(ratios):.3f})    {same_from}"
        )
        results.append({**case._asdict(), "pairs": [[outcome._asdict() for outcome in pair] for pair in pairs]})
    record.write({"configuration": config, "cases": results}, args.json)


if __name__ == "__main__":
    main()
