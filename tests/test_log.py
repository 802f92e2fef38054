"""What the package says: each line once, with one name in front of it, with and without logging set up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ddp_crossover
from ddp_crossover.log import short
from ddp_crossover.report.stats import FallbackLog

pytestmark = pytest.mark.quick

SAY = """
import logging, sys
from ddp_crossover.log import say
{setup}
say("a result")
say("a warning", logging.WARNING)
"""


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ("", ["ddp_crossover: a result", "ddp_crossover: a warning"]),
        ("logging.getLogger('ddp_crossover').setLevel('ERROR')", []),
        ("logging.disable(logging.INFO)", ["ddp_crossover: a warning"]),
        ("logging.basicConfig()", ["WARNING:ddp_crossover:a warning"]),
        ("logging.basicConfig(level='INFO')", ["INFO:ddp_crossover:a result", "WARNING:ddp_crossover:a warning"]),
        ("logging.getLogger('ddp_crossover').addHandler(logging.NullHandler())", []),
    ],
    ids=["no logging", "set to errors", "disabled", "warnings", "everything", "null handler"],
)
def test_a_line_is_shown_once_and_with_one_name(setup, expected) -> None:
    job = subprocess.run(
        [sys.executable, "-c", SAY.format(setup=setup)],
        cwd=Path(ddp_crossover.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert job.returncode == 0, job.stderr
    assert job.stderr.splitlines() == expected


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0"), (0.01234, "0.0123"), (99.96, "100"), (1024.4, "1024")])
def test_numbers_have_three_digits_and_no_exponent(value, shown) -> None:
    assert short(value) == shown


def test_a_reason_is_logged_once_by_rank_0_or_by_the_rank_that_it_concerns(caplog) -> None:
    logs = [FallbackLog(rank) for rank in range(3)]
    for log in logs * 2:
        log.note("everywhere")
    logs[2].note_here("one device")
    logs[2].note_here("one device")
    assert [record.getMessage() for record in caplog.records] == ["everywhere", "rank 2: one device"]
    assert logs[2].counts == {"everywhere": 2, "one device": 2}


def test_no_message_names_the_package_again() -> None:
    for file in Path(ddp_crossover.__file__).parent.rglob("*.py"):
        if file.name != "log.py":
            assert '"ddp_crossover: ' not in file.read_text(), file
