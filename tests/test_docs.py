"""The site builds without a warning: no broken link, no reference to a name that is not there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_crossover as dx

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

pytestmark = pytest.mark.xdist_group("docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    built = tmp_path_factory.mktemp("site")
    # As CONTRIBUTING says. Doctrees beside the site: nothing is written into the checkout.
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", str(DOCS), str(built)]
    job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # pytest's own time limit ends it
    assert job.returncode == 0, job.stdout + job.stderr
    return built


def test_the_site_builds_strictly_and_has_every_page(site: Path) -> None:
    assert {page.stem for page in DOCS.glob("*.md")} <= {page.stem for page in site.glob("*.html")}


def test_every_public_name_is_on_the_api_page(site: Path) -> None:
    page = (site / "api.html").read_text()
    assert [name for name in dx.__all__ if f'id="ddp_crossover.{name}"' not in page] == []


def test_every_recipe_is_on_a_page() -> None:
    page = (DOCS / "recipes.md").read_text()
    assert [recipe.name for recipe in DOCS.glob("recipes/*.py") if f"recipes/{recipe.name}" not in page] == []


def test_the_design_page_has_every_room() -> None:
    page = (DOCS / "design.md").read_text()
    rooms = page[page.index("## Rooms") : page.index("## Changes that")]
    named = set(re.findall(r"`(\w+)(?:/|\.py)`", rooms))
    package = ROOT / "ddp_crossover"
    assert named == _rooms_in(package)
    assert set(re.findall(r"`addons/(\w+)(?:/|\.py)`", rooms)) == _rooms_in(package / "addons")


def test_what_a_page_says_of_its_add_on_s_lines_is_so() -> None:
    said = [
        match
        for page in DOCS.glob("*.md")
        for match in re.findall(r"`addons/(\w+)/`,\s+of\s+([\d,]+)\s+lines", page.read_text())
    ]
    assert len(said) == 6
    for add_on, lines in said:
        files = (ROOT / "ddp_crossover" / "addons" / add_on).rglob("*.py")
        assert sum(len(file.read_text().splitlines()) for file in files) == pytest.approx(
            int(lines.replace(",", "")), rel=0.1
        )


def _rooms_in(folder: Path) -> set[str]:
    there = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return there - {"__init__"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", sorted(DOCS.glob("*.sbatch")), ids=lambda path: path.name)
def test_batch_scripts_are_shell(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
