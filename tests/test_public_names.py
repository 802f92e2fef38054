"""`import ddp_crossover`: what it offers, and that commands which need no torch do not wait for it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_crossover as dx

ROOT = Path(dx.__file__).parents[1]


def _in_a_new_interpreter(*arguments: str, status: int = 0) -> str:
    job = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert job.returncode == status, job.stderr
    return job.stdout + job.stderr


@pytest.mark.parametrize("name", dx.__all__)
def test_every_public_name_is_there(name) -> None:
    assert getattr(dx, name).__module__.startswith("ddp_crossover.")
    assert name in dir(dx)


def test_type_checkers_know_every_public_name() -> None:
    (known,) = (node for node in ast.parse(Path(dx.__file__).read_text()).body if isinstance(node, ast.If))
    names = {alias.name for each in known.body if isinstance(each, ast.ImportFrom) for alias in each.names}
    assert names == {*dx.__all__, "data", "integrations", "optim", "relaxed"}


def test_integrations_are_there_without_an_import_of_their_own() -> None:
    assert dx.integrations.accelerate.attach.__module__ == "ddp_crossover.integrations.accelerate"
    with pytest.raises(AttributeError, match="has no attribute 'keras'"):
        dx.integrations.keras  # noqa: B018


def test_optimizers_are_there_without_an_import_of_their_own() -> None:
    program = "import ddp_crossover as dx; print(dx.optim.LARS.__name__, dx.optim.LAMB.__name__)"
    assert _in_a_new_interpreter("-c", program).split() == ["LARS", "LAMB"]


def test_what_is_not_there_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'atach'"):
        dx.atach  # noqa: B018


def test_the_version_is_that_of_the_package_and_of_the_citation() -> None:
    assert f"\nversion: {dx.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{dx.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert _in_a_new_interpreter("-m", "ddp_crossover", "--version") == f"ddp_crossover {dx.__version__}\n"


def test_a_script_that_asks_for_nothing_imports_no_torch() -> None:
    program = (
        "import sys, ddp_crossover; print('torch' in sys.modules); ddp_crossover.attach; print('torch' in sys.modules)"
    )
    assert _in_a_new_interpreter("-c", program).split() == ["False", "True"]


@pytest.mark.parametrize("verb", ["status", "top"])
def test_asking_a_broker_imports_no_torch(verb: str, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir(mode=0o700)
    lease = ("-X", "importtime", "-m", "ddp_crossover", "lease", verb, "--directory", str(tmp_path / "none"))
    output = _in_a_new_interpreter(*lease, status=1)
    assert "no broker serves" in output
    assert "| torch\n" not in output and "ddp_crossover.addons.lease.directory\n" in output
