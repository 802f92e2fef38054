"""The workflows run what is there: each command names modules, folders and options of this checkout.

A night misses no folder of tests; a release is published only from a tag, once all that was built has been checked.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
WORKFLOW_FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(WORKFLOW_FOLDER.glob("*.yml"))
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


def _steps(workflow: str, job: str) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = yaml.safe_load((WORKFLOW_FOLDER / workflow).read_text())["jobs"][job]["steps"]
    return steps


def test_a_release_is_published_only_from_a_tag_and_after_its_checks_without_a_stored_token() -> None:
    release: dict[Any, Any] = yaml.safe_load((WORKFLOW_FOLDER / "release.yml").read_text())
    assert release[True] == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}  # YAML takes `on` for a truth value
    jobs = release["jobs"]
    assert (jobs["check"]["needs"], jobs["publish"]["needs"]) == ("build", "check")
    assert jobs["publish"]["if"] == "github.event_name == 'push'"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert [name for name, job in jobs.items() if "id-token" in str(job.get("permissions"))] == ["publish"]
    assert "secrets." not in (WORKFLOW_FOLDER / "release.yml").read_text()
    checkouts = [step for step in _steps("release.yml", "check") if "checkout" in step.get("uses", "")]
    assert checkouts == []  # what is checked is what was built


def test_a_release_is_checked_on_each_python_that_the_package_names() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = re.findall(r":: (3\.\d+)", " ".join(classifiers))
    for workflow in ("release.yml", "check.yml"):
        jobs = yaml.safe_load((WORKFLOW_FOLDER / workflow).read_text())["jobs"]
        assert jobs["check"]["strategy"]["matrix"]["python"] == named


@pytest.mark.parametrize(("tag", "section", "passes"), [("v1.2.3", "1.2.3", True), ("v1.2.4", "1.2.3", False)])
def test_a_tag_that_is_not_the_version_is_not_released(tag: str, section: str, passes: bool, tmp_path: Path) -> None:
    (step,) = (step for step in _steps("release.yml", "build") if "tag" in step.get("if", ""))
    (tmp_path / "ddp_crossover").mkdir()
    (tmp_path / "ddp_crossover" / "__init__.py").write_text('"""A package."""\n\n__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"## [Unreleased]\n\n## [{section}] - 2026-11-29\n")
    environment = {**os.environ, "GITHUB_REF_NAME": tag}
    job = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environment, capture_output=True)
    assert (job.returncode == 0) == passes
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n")
    assert subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environment).returncode != 0


def test_the_scripts_and_options_of_a_release_s_checks_are_there() -> None:
    commands = " ".join(step.get("run", "") for step in _steps("release.yml", "check"))
    (recipe,) = re.findall(r"sdist/(\S+\.py)", commands)
    assert (ROOT / recipe).is_file() and "--max-iters" in (ROOT / recipe).read_text()
    from ddp_crossover import cli

    assert set(re.findall(r"ddp_crossover (\w+)", commands)) <= set(cli.COMMANDS)
    assert set(re.findall(r"ddp-crossover ([\w-]+)", commands)) <= set(cli.scripts.SCRIPTS)


def test_the_docs_are_built_with_their_own_extra_as_contributing_says() -> None:
    commands = [step["run"] for step in _steps("docs.yml", "build") if "run" in step]
    assert [command for command in commands if "ddp_crossover" in command or "[" in command] == [
        'pip install ".[docs]"'
    ]
    assert commands[-1].replace("python", ".venv/bin/python") in (ROOT / "CONTRIBUTING.md").read_text()


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem)
def test_a_form_asks_for_what_the_doctor_prints(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    assert all({"id", "type", "attributes"} <= field.keys() for field in form["body"])
    (doctor,) = (field for field in form["body"] if field["id"] == "doctor")
    assert "doctor --json" in str(doctor) and doctor["attributes"]["render"] == "json"


def test_each_package_that_development_needs_is_locked_and_from_no_index_in_particular() -> None:
    text = (ROOT / "requirements-dev.lock").read_text()
    assert "://" not in text
    locked = {_normal(name) for name in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [
        *project["dependencies"],
        *(line for lines in project["optional-dependencies"].values() for line in lines),
    ]
    names = {_normal(match[0]) for line in needed if (match := re.match(r"[\w.-]+", line))}
    assert names - {_normal(project["name"])} <= locked


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_commits_are_checked_by_tools_of_the_environment_that_ci_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    ci = (ROOT / ".ci" / "run").read_text()
    for hook in hooks:
        tool = re.sub(r"^\.venv/bin/(python -m )?| --force-exclude$", "", hook["entry"])
        assert f'step "$PY" -m {tool}' in ci, hook["entry"]
