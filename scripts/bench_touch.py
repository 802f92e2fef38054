"""What a pending parameter costs: each thing that is done to it between `step()` and its use, by name.

    python scripts/bench_touch.py
    python scripts/bench_touch.py --json touch.json

One process, no communication: parameters of the size of a small layer, best of some rounds over all of them, because
whatever else a shared machine does only adds to a time. An optimizer update itself is not in it.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.nn import Parameter

from bench_record import surroundings
from ddp_crossover.parameters.lazy_params import LazyParams
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


def measure(count: int, rounds: int) -> dict[str, float]:
    """Microseconds per parameter and step."""
    parameters = [Parameter(torch.zeros(32, 32)) for _ in range(count)]
    params = LazyParams([(f"p{index}", parameter) for index, parameter in enumerate(parameters)])
    lazies = params.all

    def bring_up_to_date(pending: Any) -> None:
        for lazy in pending:
            lazy.uncover()
            lazy.is_waiting = False

    params.bring_up_to_date = bring_up_to_date

    def arm_all() -> None:
        for lazy in lazies:
            arm(lazy.parameter, lazy)

    def disarm_all() -> None:
        for parameter in parameters:
            disarm(parameter)

    def cover_all() -> None:
        for lazy in lazies:
            lazy.cover()

    def uncover_all() -> None:
        for lazy in lazies:
            lazy.uncover()

    def show() -> None:
        uncover_all()
        for lazy in lazies:
            lazy.is_waiting, lazy.shadow = False, None
        disarm_all()

    def detach_all() -> None:
        for parameter in parameters:
            parameter.detach()

    def note(*, hide: bool = False) -> None:
        params.make_lazy(lazies, lambda _: None, hide_values=hide)

    def nothing() -> None:
        pass

    def each(work: Callable[[], Any], undo: Callable[[], Any] = nothing) -> float:
        return 1e6 * seconds_each(count, rounds, work, undo)

    plain = each(detach_all)
    costs = {
        "step(): is its memory its own? (why_not_lazy)": each(lambda: params.why_not_lazy(lazies)),
        "step(): note the update, change the class (make_lazy)": each(note, show),
        "  of this, the change of class (arm)": each(arm_all, disarm_all),
    }
    note()
    uncover_all()
    costs["  of this, the cover (cover)"] = each(cover_all, uncover_all)
    cover_all()
    costs["taking the cover off before the update (uncover)"] = each(uncover_all, cover_all)
    costs["first touch, by an operator (LazyParam.use)"] = each(detach_all, note) - plain
    show()
    arm_all()
    costs["  of this, the change back (disarm)"] = each(disarm_all, arm_all)
    costs["reading .grad or .shape of a pending one, per read"] = each(
        lambda: [parameter.grad for parameter in parameters]
    ) - each(lambda: [lazy.memory.grad for lazy in lazies])
    disarm_all()
    costs["strict: hide the value of 32 x 32"] = each(lambda: note(hide=True), show) - each(note, show)
    costs["later touches, and operators on plain parameters"] = each(detach_all) - plain
    return costs


def main() -> None:
    """Measure, print, and write what `--json` asks for."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--parameters", type=int, default=2000, help="how many of them")
    parser.add_argument("--rounds", type=int, default=50, help="repetitions, of which the best counts")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs_us = measure(args.parameters, args.rounds)
    table = Table(title="A pending parameter, per parameter and step", title_justify="left", box=box.SIMPLE)
    table.add_column("what is done", no_wrap=True)
    table.add_column("us", justify="right")
    for name, cost_us in costs_us.items():
        table.add_row(name, f"{cost_us:.2f}")
    Console().print(table)
    if args.json:
        result = {"configuration": {"torch": torch.__version__} | surroundings(args), "us": costs_us}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
