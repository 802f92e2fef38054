"""The workflows run what is there: each night's command names modules and folders of this checkout, and misses none."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
NIGHT = next(each for each in WORKFLOWS if each.name == "night.yml")


def _commands() -> list[str]:
    night: dict[str, Any] = yaml.safe_load(NIGHT.read_text())
    return [each["run"] for each in night["jobs"]["night"]["strategy"]["matrix"]["include"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_can_be_read_and_has_limits(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    assert all("timeout-minutes" in job for job in jobs.values())


def test_a_night_runs_modules_with_options_that_they_have() -> None:
    for command in _commands():
        if module := re.search(r"-m (tests\.\w+)", command):
            assert importlib.util.find_spec(module[1]) is not None
            told = subprocess.run(
                [sys.executable, "-m", module[1], "--help"], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout
            assert all(option in told for option in re.findall(r"(?<= )--\w+", command)), command


def test_a_night_leaves_no_folder_of_tests_out() -> None:
    named = set(re.findall(r"tests/[\w*]+(?:\.py)?", " ".join(_commands())))
    folders = {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")}
    folders |= {f"tests/{path.relative_to(ROOT / 'tests').parts[0]}" for path in (ROOT / "tests").glob("*/*/test_*.py")}
    assert named == folders | {"tests/test_*.py"}
