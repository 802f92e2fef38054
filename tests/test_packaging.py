"""What a new user starts: a checkout that is not installed, and the wheel and the sdist that are made of it.

The wheel is installed without network into an environment of its own, which finds torch where these tests have it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import ddp_crossover as dx
from ddp_crossover.addons.scripts import SCRIPTS

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 240
PACKAGES = Path(sysconfig.get_path("purelib"))

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
needs_hatchling = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None,
    reason="builds with hatchling, and without network: pip install hatchling",
)


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints, in an environment with nothing but these variables and the search path."""
    job = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env={"PATH": os.environ["PATH"], "HOME": str(cwd), **environment},
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def python_with(packages: Path, folder: Path) -> Path:
    """The interpreter of a new environment that finds these packages, too."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All packages that these tests run with, but for this one."""
    folder = tmp_path_factory.mktemp("others")
    for package in PACKAGES.iterdir():
        if "ddp_crossover" not in package.name:
            (folder / package.name).symlink_to(package)
    return folder


@pytest.fixture(scope="module")
def python_without_us(others: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_with(others, tmp_path_factory.mktemp("checkout") / "venv")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("-c", "import ddp_crossover as dx; print(dx.__version__, dx.attach.__module__)"), "ddp_crossover.attaching"),
        (("-m", "ddp_crossover", "--version"), f"ddp_crossover {dx.__version__}"),
        (("-m", "ddp_crossover", "--help"), "usage: python -m ddp_crossover"),
        ((ROOT / "scripts" / "train.py", "--help"), "usage: train.py"),
        ((ROOT / "scripts" / "bench.py", "--help"), "usage: bench.py"),
    ],
    ids=["import", "version", "help", "train", "bench"],
)
def test_a_checkout_works_that_is_not_installed(
    command: tuple[str | Path, ...], words: str, python_without_us: Path, tmp_path: Path
) -> None:
    assert words in run(python_without_us, *command, cwd=tmp_path, PYTHONPATH=str(ROOT))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("built")
    program = f"import hatchling.build as b; b.build_wheel({str(folder)!r}); b.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", program, cwd=ROOT, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    return folder


@needs_hatchling
def test_the_wheel_has_the_package_with_its_types_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert {name.split("/")[0] for name in names} == {"ddp_crossover", f"ddp_crossover-{dx.__version__}.dist-info"}
    assert {"ddp_crossover/py.typed", "ddp_crossover/addons/launch/site/sitecustomize.py"} <= set(names)
    assert f"\nVersion: {dx.__version__}\n" in metadata and "\nProject-URL: " in metadata


def _is_tracked(path: Path) -> bool:
    """Whether it is part of the repository, or would be; true without git, as in an unpacked sdist."""
    if path.name == ".git" or path.name == "PKG-INFO":
        return False
    ignored = subprocess.run(["git", "check-ignore", "-q", path.name], cwd=ROOT, stderr=subprocess.DEVNULL)
    return ignored.returncode != 0


@needs_hatchling
@pytest.mark.parametrize("repository", ["", "https://example.invalid/owner/name/"])
def test_links_lead_to_the_repository_that_builds_and_nowhere_if_that_is_not_known(
    repository: str, tmp_path: Path
) -> None:
    program = f"import hatchling.build as b; print(b.prepare_metadata_for_build_wheel({str(tmp_path)!r}))"
    packages = os.environ.get("PYTHONPATH", "")
    run(sys.executable, "-c", program, cwd=ROOT, PYTHONPATH=packages, DDP_CROSSOVER_URL=repository)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    assert "Project-URL: DeAR (paper), https://arxiv.org" in text
    page = "https://example.invalid/owner/name/blob/main"
    assert (f"\nProject-URL: Changelog, {page}/CHANGELOG.md\n" in text) == bool(repository)
    assert (f"]({page}/docs/guide.md)" in text) == bool(repository) == ("](docs/" not in text)


@needs_hatchling
def test_the_sdist_has_what_a_checkout_has(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "ddp_crossover/py.typed", "scripts/demo.sh", "tests/conftest.py"} <= names
    left_out = {".gitignore"}
    assert {path.name for path in ROOT.iterdir() if _is_tracked(path)} - {
        name.split("/")[0] for name in names
    } <= left_out


@needs_hatchling
def test_the_wheel_has_all_that_its_scripts_import(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "ddp_crossover" / "_scripts"
    assert {path.name for path in folder.glob("*.py")} == {script.file for script in SCRIPTS.values()} | {"train.py"}
    ours = {path.stem for path in (ROOT / "scripts").iterdir()}
    missing = [
        f"{path.name}: {module}"
        for path in folder.rglob("*.py")
        for module in _imported(path)
        if module.partition(".")[0] in ours and not _is_module(folder, module)
    ]
    assert missing == []


def _imported(path: Path) -> list[str]:
    """Modules that a file imports; of `from package import name`, both, as `name` may be one."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
            if (ROOT / "scripts" / node.module.replace(".", "/")).is_dir():
                modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules


def _is_module(folder: Path, name: str) -> bool:
    path = folder / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.fixture(scope="module")
def installed(built: Path, others: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    python = python_with(others, folder / "venv")
    (wheel,) = built.glob("*.whl")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check", wheel, cwd=folder)
    return python.parent


@needs_hatchling
def test_the_installed_wheel_runs_its_command(installed: Path, tmp_path: Path) -> None:
    assert "usage: ddp-crossover" in run(installed / "ddp-crossover", "--help", cwd=tmp_path)
    assert "usage: python -m ddp_crossover" in run(installed / "python", "-m", "ddp_crossover", "--help", cwd=tmp_path)
    where = run(installed / "python", "-c", "import ddp_crossover as dx; print(dx.__file__, dx.attach)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))


@needs_hatchling
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_installed_wheel_runs_scripts_as_commands(name: str, installed: Path, tmp_path: Path) -> None:
    for module in SCRIPTS[name].needs:
        pytest.importorskip(module)
    assert f"usage: ddp-crossover {name}" in run(installed / "ddp-crossover", name, "--help", cwd=tmp_path)


@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if script.needs])
def test_a_command_whose_packages_are_missing_names_the_extra(name: str) -> None:
    program = (
        "import importlib.util as util, sys\n"
        "from ddp_crossover import cli\n"
        f"util.find_spec = lambda module: None\nsys.exit(cli.main([{name!r}, '--help']))"
    )
    job = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert job.returncode == 2 and f"{name} needs torchvision" in job.stderr
    extras = ",".join(dict.fromkeys(SCRIPTS[name].needs.values()))
    assert f'pip install "ddp_crossover[{extras}]"' in job.stderr
