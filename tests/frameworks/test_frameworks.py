"""Frameworks' own trainers, unmodified, plain and under `run`: parameters, buffers, optimizers' states and checkpoints
have the same bits on both ranks, and the pipeline has run.

Each framework is installed, in the version that is named here, into an environment of its own over that of the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import environments
import launched

LAUNCH_TIMEOUT_S = 240
SCRIPTS = Path(__file__).parent

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(environments.INSTALL_TIMEOUT_S + 2 * LAUNCH_TIMEOUT_S),
    pytest.mark.xdist_group("frameworks"),
]


@dataclass(frozen=True)
class Framework:
    """A script with a trainer of a framework, and what it needs."""

    script: str
    packages: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    defers: bool = True
    """Whether updates are put off: not if the trainer clips, or takes norms to log them."""
    without_dependencies: tuple[str, ...] = ()
    """Packages that ask for another torch, and do not need it."""
    fusion_mb: float = 0.005


IGNITE = ("pytorch-ignite==0.5.5",)
SENTENCES = ("sentence-transformers==6.2.0", "datasets==5.2.0")
CLIP = ("open_clip_torch==3.3.0", "pandas==3.1.1")
LIGHTLY = ("lightly==1.6.0",)
MMENGINE = ("mmengine==0.10.7",)
FASTAI = ("fastai==2.8.12",)
TRL = ("trl==1.16.0", "peft==0.21.2", "datasets==5.2.0")
SPEECHBRAIN = ("speechbrain==1.1.2",)
COMPOSER = (
    "mosaicml-cli==0.8.3", "torch-optimizer==0.3.0", "coolname==5.0.0", "tabulate==0.10.0", "py-cpuinfo==9.0.0",
    "importlib-metadata==8.9.0",
)  # fmt: skip

COMPOSER_ITSELF = ("mosaicml==0.32.1",)

FRAMEWORKS = {
    "ignite": Framework("ignite_engine", IGNITE),
    "mmengine": Framework("mmengine_runner", MMENGINE),
    "mmengine_options": Framework("mmengine_runner", MMENGINE, ("--options",), defers=False),
    "composer": Framework("composer_trainer", COMPOSER, without_dependencies=COMPOSER_ITSELF),
    "composer_options": Framework("composer_trainer", COMPOSER, ("--options",), False, COMPOSER_ITSELF),
    "open_clip": Framework("open_clip_train_main", CLIP, fusion_mb=0.5),
    "open_clip_accumulation": Framework("open_clip_train_main", CLIP, ("--accum-freq", "2"), fusion_mb=0.5),
    "ultralytics": Framework("ultralytics_trainer", ("ultralytics==8.4.190",), defers=False, fusion_mb=0.5),
    "sentence_transformers": Framework("sentence_transformers_trainer", SENTENCES, defers=False),
    "sentence_transformers_cached": Framework("sentence_transformers_trainer", SENTENCES, ("--cached",), defers=False),
    "speechbrain": Framework("speechbrain_brain", SPEECHBRAIN, defers=False),
    "speechbrain_accumulation": Framework("speechbrain_brain", SPEECHBRAIN, ("--accumulate",), defers=False),
    "mace": Framework("mace_run_train", ("mace-torch==0.3.16",), defers=False),
    "monai": Framework("monai_trainer", ("monai==1.6.1", *IGNITE)),
    "torchrl": Framework("torchrl_learner", ("torchrl==0.14.1", "tensordict==0.14.3"), defers=False),
    "trl_sft": Framework("trl_trainers", TRL, defers=False),
    "trl_dpo": Framework("trl_trainers", TRL, ("--dpo",), defers=False),
    "trl_grpo": Framework("trl_trainers", TRL, ("--grpo",), defers=False),
    "fastai": Framework("fastai_learner", FASTAI),
    "skorch": Framework("skorch_accelerate", ("skorch==1.4.0",), defers=False),
    "lightly_moco": Framework("lightly_moco", LIGHTLY),
    "lightly_dino": Framework("lightly_moco", LIGHTLY, ("--dino",)),
    "flair": Framework("flair_trainer", ("flair==0.15.1",), defers=False),
}

Interpreter = Callable[[Framework], Path]


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    """`interpreter(framework)`: the Python of an environment with its packages; skips where they cannot be had."""
    made: dict[tuple[str, ...], Path | str] = {}

    def interpreter(framework: Framework) -> Path:
        key = (*framework.packages, *framework.without_dependencies)
        if key not in made:
            folder = tmp_path_factory.mktemp("environment")
            made[key] = environments.make(folder, framework.packages, framework.without_dependencies)
        found = made[key]
        if isinstance(found, str):
            pytest.skip(f"{' '.join(key)} cannot be installed here: {found}")
        return found

    return interpreter


def _digests(python: Path, framework: Framework, folder: Path, *under_run: object) -> list[str]:
    output = launched.run(
        *(*launched.torchrun(), *under_run, SCRIPTS / f"{framework.script}.py", *framework.arguments),
        python=python,
        variables={"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "YOLO_OFFLINE": "true", "HOME": str(folder)},
        cwd=folder,
        timeout_s=LAUNCH_TIMEOUT_S,
    )
    return sorted(re.findall(r"^digest .*", output, re.MULTILINE))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_under_run_a_trainer_leaves_what_it_leaves_under_plain_ddp(
    interpreter: Interpreter, tmp_path: Path, name: str
) -> None:
    framework = FRAMEWORKS[name]
    python = interpreter(framework)
    plain, attached, stats = tmp_path / "plain", tmp_path / "attached", tmp_path / "stats.json"
    plain.mkdir()
    attached.mkdir()
    run = ("-m", "ddp_crossover", "run", "--fusion-mb", framework.fusion_mb, "--stats", stats)
    expected = _digests(python, framework, plain)
    assert len(expected) >= 2 * 4, expected
    assert _digests(python, framework, attached, *run) == expected
    figures = json.loads(stats.read_text())
    assert figures, "not attached"
    for of_model in figures:
        assert of_model["pipelined_iterations"] > 0, of_model
        assert (of_model["deferred_steps"] > 0) == framework.defers, of_model
