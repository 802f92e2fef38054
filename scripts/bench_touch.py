"""Measure each thing that is done to a pending parameter between step() and its use, one by one.

    python scripts/bench_touch.py
    python scripts/bench_touch.py --json touch.json

One process, no communication: parameters of the size of a small layer. The best of some rounds over all of them counts,
because other work on a shared machine only adds to a time. The update itself is not measured.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.nn import Parameter

from bench_kit import record
from bench_kit.options import add_results, make_parser, positive_int
from ddp_crossover.parameters.lazy_params import LazyParam, LazyParams
from ddp_crossover.parameters.pending_parameter import arm, disarm


def seconds_each(parameters: int, rounds: int, work: Callable[[], Any], undo: Callable[[], Any]) -> float:
    """Seconds per parameter of `work`, which is done to all of them; `undo` is not counted."""
    best_s = float("inf")
    for _ in range(rounds):
        start_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - start_s)
        undo()
    return best_s / parameters


class Pending:
    """Parameters, and each thing that happens to a pending one, done to all of them."""

    def __init__(self, count: int) -> None:
        self.parameters = [Parameter(torch.zeros(32, 32)) for _ in range(count)]
        self.params = LazyParams([(f"p{index}", parameter) for index, parameter in enumerate(self.parameters)])
        self.lazies = self.params.all

    def bring_up_to_date(self, lazies: Iterable[LazyParam]) -> None:
        """As deferred updates do, without an update."""
        for lazy in lazies:
            lazy.uncover()
            lazy.end_wait()

    def join(self) -> None:
        """There are no streams."""

    def note(self, *, hide: bool = False) -> None:
        """Note an update of all, as `step()` does."""
        self.params.make_lazy(self.lazies, lambda _: None, by=self, hide_values=hide)

    def show(self) -> None:
        """Undo `note`."""
        self.uncover()
        for lazy in self.lazies:
            lazy.end_wait()
            lazy.shadow = None
        self.disarm()

    def why_not_lazy(self) -> None:
        """Ask whether the memory of each is its own."""
        self.params.why_not_lazy(self.lazies)

    def arm(self) -> None:
        """Change the class of all."""
        for lazy in self.lazies:
            arm(lazy.parameter, lazy)

    def disarm(self) -> None:
        """Undo `arm`."""
        for parameter in self.parameters:
            disarm(parameter)

    def cover(self) -> None:
        """Put the cover over the memory of all."""
        for lazy in self.lazies:
            lazy.cover()

    def uncover(self) -> None:
        """Undo `cover`."""
        for lazy in self.lazies:
            lazy.uncover()

    def detach(self) -> None:
        """Touch all with a cheap operator."""
        for parameter in self.parameters:
            parameter.detach()

    def read_grads(self) -> None:
        """Read an attribute of all through the pending parameter."""
        _ = [parameter.grad for parameter in self.parameters]

    def read_plain_grads(self) -> None:
        """Read the same attribute of the plain tensors."""
        _ = [lazy.memory.grad for lazy in self.lazies]


def measure(count: int, rounds: int) -> dict[str, float]:
    """Microseconds per parameter and step."""

    def each(work: Callable[[], Any], undo: Callable[[], Any] = lambda: None) -> float:
        return 1e6 * seconds_each(count, rounds, work, undo)

    them = Pending(count)
    plain = each(them.detach)
    costs = {
        "step(): is its memory its own? (why_not_lazy)": each(them.why_not_lazy),
        "step(): note the update, change the class (make_lazy)": each(them.note, them.show),
        "  of this, the change of class (arm)": each(them.arm, them.disarm),
    }
    them.note()
    them.uncover()
    costs["  of this, the cover (cover)"] = each(them.cover, them.uncover)
    them.cover()
    costs["taking the cover off before the update (uncover)"] = each(them.uncover, them.cover)
    costs["first touch, by an operator (LazyParam.use)"] = each(them.detach, them.note) - plain
    them.show()
    them.arm()
    costs["  of this, the change back (disarm)"] = each(them.disarm, them.arm)
    reads = "reading .grad or .shape of a pending one, per read"
    costs[reads] = each(them.read_grads) - each(them.read_plain_grads)
    them.disarm()
    hidden = each(lambda: them.note(hide=True), them.show)
    costs["strict: hide the value of 32 x 32"] = hidden - each(them.note, them.show)
    costs["later touches, and operators on plain parameters"] = each(them.detach) - plain
    return costs


def main() -> None:
    """Measure, print, and write the file that `--json` asks for."""
    parser = make_parser(__doc__)
    parser.add_argument("--parameters", type=positive_int, default=2000, help="number of parameters (%(default)s)")
    parser.add_argument("--rounds", type=positive_int, default=50, help="rounds; the best counts (%(default)s)")
    add_results(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs_us = measure(args.parameters, args.rounds)
    table = Table(title="A pending parameter, per parameter and step", title_justify="left", box=box.SIMPLE)
    table.add_column("what is done", no_wrap=True)
    table.add_column("us", justify="right")
    for name, cost_us in costs_us.items():
        table.add_row(name, f"{cost_us:.2f}")
    Console().print(table)
    config = record.configuration(args, torch=torch.__version__)
    record.write({"configuration": config, "us": costs_us}, args.json)


if __name__ == "__main__":
    main()
