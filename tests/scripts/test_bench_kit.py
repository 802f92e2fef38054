"""The kit of the benches: the order of turns, quantiles, fairness, the record; and a whole run of a small bench."""

import ast
import io
import json
import math
import random
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import launched
from bench_kit import record
from bench_kit.rounds import jain_index, median_at_least, spread, turns
from bench_kit.tables import print_table
from launched import SCRIPTS

TIMEOUT_S = 300


def test_every_candidate_takes_a_turn_in_each_round_and_another_one_begins() -> None:
    order = [(turn.round, turn.index) for turn in turns(candidates=3, rounds=2)]
    assert order == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 0)]
    assert [turn.behind for turn in turns(3, 2)] == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])


def test_a_median_is_at_least_what_few_samples_of_it_allow() -> None:
    assert median_at_least([3.0, 1.0, 2.0, 4.0]) is None
    assert median_at_least([5.0, 3.0, 1.0, 2.0, 4.0]) == 1.0
    assert median_at_least(list(map(float, range(10)))) == 1.0


def test_the_bound_of_a_median_holds_in_95_of_100_cases() -> None:
    draw = random.Random(0)
    median = math.log(2)  # of the exponential distribution
    bounds = [median_at_least([draw.expovariate(1.0) for _ in range(12)]) for _ in range(4000)]
    assert 0.01 < sum(bound > median for bound in bounds) / len(bounds) < 0.05


def test_a_spread_is_median_and_quartiles() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_jains_index(shares: list[float]) -> None:
    assert 1 / len(shares) <= jain_index(shares) * (1 + 1e-9) and jain_index(shares) <= 1 + 1e-9
    assert jain_index([shares[0]] * len(shares)) == pytest.approx(1)


def test_the_record_holds_the_machine_and_all_arguments(tmp_path: Path) -> None:
    file = tmp_path / "new" / "record.json"
    config = record.configuration(Namespace(rounds=3, json=file), backend="gloo")
    record.write({"configuration": config}, file)
    written = json.loads(file.read_text())["configuration"]
    assert (written["backend"], written["rounds"], written["json"]) == ("gloo", 3, str(file))
    assert {"python", "kernel", "machine", "processor", "cores"} <= written.keys()


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda script: script.name)
def test_every_script_begins_with_the_command_to_run(script: Path) -> None:
    text = ast.get_docstring(ast.parse(script.read_text()))
    assert text is not None
    ways = (f"scripts/{script.name}", f"ddp-crossover {script.stem.replace('_', '-')}")
    assert any(line.startswith("    ") and any(way in line for way in ways) for line in text.splitlines())


def test_every_step_of_the_lease_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "handoff.json"
    small = "--rounds 1 --turns 30"
    shown = launched.run(SCRIPTS / "bench_handoff.py", *small.split(), "--json", file, timeout_s=TIMEOUT_S)
    rounds = json.loads(file.read_text())["rounds"]
    assert len(rounds) == 4 and all(name in shown for name in rounds)
    assert all(figures[0].keys() == {"samples", "p50", "p99"} for figures in rounds.values())
    assert rounds["hand-off, us"][0]["p50"] > 0


def test_a_narrow_console_cuts_no_figure() -> None:
    output = io.StringIO()
    console = Console(width=40, file=output)
    cells = [f"figure{place}" for place in range(12)]
    print_table(console, [f"heading{place}" for place in range(12)], [cells])
    assert all(cell in output.getvalue() for cell in cells) and console.width == 40
