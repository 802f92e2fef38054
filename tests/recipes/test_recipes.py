"""Every script in docs/recipes as its users start it: plain, with its one line, and unchanged under `run`.

Each launch has two ranks on gloo, and most are a torchrun. The final state of every rank, the optimizer's included,
must be that of plain DDP bit for bit. Three recipes run before each change, the others at night.

Recipes that weight ranks by tokens are compared with one process that has the whole batch.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import environments
import launched
from equivalence import assert_same
from matrix import often

RANKS = 2
LAUNCH_TIMEOUT_S = 240
LAUNCHES_PER_TEST = 4

pytestmark = [
    pytest.mark.timeout(environments.INSTALL_TIMEOUT_S + LAUNCHES_PER_TEST * LAUNCH_TIMEOUT_S),
    pytest.mark.xdist_group("recipes"),
]


@dataclass(frozen=True)
class Recipe:
    """A script, and how it is started."""

    script: str
    arguments: tuple[str, ...] = ()
    needs: str = "torch"
    installs: str = ""
    """A package that it gets in an environment of its own."""
    starts_its_ranks: bool = False
    """Whether it starts its ranks itself, so that neither torchrun nor `run` does."""
    defers: bool = True
    """Whether it puts updates off: not if it clips with exact norms, or averages weights after each step."""
    defers_with_sharded_norms: bool = True
    checkpoint: str = ""
    """What it saves half way in `--output-dir`, if it can resume."""


RECIPES = {
    "nanogpt": Recipe("nanogpt_like", defers=False),
    "nanogpt_without_clipping": Recipe("nanogpt_like", ("--grad-clip", "0")),
    "torchvision": Recipe("torchvision_like", checkpoint="model_1.pth"),
    "lightning": Recipe("lightning_trainer", needs="lightning", checkpoint="epoch=1.ckpt"),
    "lightning_manual": Recipe("lightning_trainer", ("--manual",), needs="lightning"),
    "lightning_clipping": Recipe(
        "lightning_trainer", ("--gradient-clip-val", "0.1", "--accumulate", "2"), needs="lightning", defers=False
    ),
    "fabric": Recipe("fabric", ("--accumulate", "2", "--epochs", "6"), needs="lightning"),
    "accelerate": Recipe("accelerate_loop", needs="accelerate"),
    "accelerate_clipping": Recipe("accelerate_loop", ("--max-grad-norm", "0.1"), needs="accelerate", defers=False),
    "trainer": Recipe(
        "hf_trainer", ("--save-steps", "8"), needs="transformers", defers=False, checkpoint="checkpoint-8"
    ),
    "async_checkpoints": Recipe("async_checkpoints", checkpoint="step=8"),
    "lr_finder": Recipe("lr_finder"),
    "tensorboard": Recipe("loggers", ("--log-dir", "runs"), installs="tensorboard==2.21.0"),
    "wandb": Recipe("loggers", ("--log-dir", "runs", "--logger", "wandb"), installs="wandb==0.31.0"),
    "notebook": Recipe("notebook", needs="accelerate", starts_its_ranks=True),
    "ray": Recipe("ray_train", installs="ray[train]==2.60.0", starts_its_ranks=True),
    "timm": Recipe("timm_like", needs="timm"),
    "timm_average": Recipe(
        "timm_like", ("--model-ema", "--clip-grad", "1"), needs="timm", defers=False, defers_with_sharded_norms=False
    ),
}


class Launch(NamedTuple):
    """What a launch left behind."""

    folder: Path
    output: str

    def state(self, rank: int) -> object:
        """Return the final state of a rank."""
        return torch.load(self.folder / f"{rank}.pt", weights_only=True)


Launcher = Callable[..., Launch]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """`launch(recipe, *flags, run=(), ranks=2)`: run a recipe, or hand out what it has left like this."""
    done: dict[tuple[object, ...], Launch] = {}
    pythons: dict[str, Path | str] = {"": Path(sys.executable)}

    def python_for(recipe: Recipe) -> Path:
        pytest.importorskip(recipe.needs)
        if recipe.installs not in pythons:
            pythons[recipe.installs] = environments.make(tmp_path_factory.mktemp("environment"), [recipe.installs])
        found = pythons[recipe.installs]
        if isinstance(found, str):
            pytest.skip(f"{recipe.installs} cannot be installed here: {found}")
        return found

    def launch(recipe: Recipe, *flags: str, run: tuple[str, ...] = (), ranks: int = RANKS) -> Launch:
        key = (recipe, flags, run, ranks)
        if key not in done:
            python = python_for(recipe)
            done[key] = _launch(tmp_path_factory.mktemp(recipe.script), python, recipe, flags, run, ranks)
        return done[key]

    return launch


def _launch(
    folder: Path, python: Path, recipe: Recipe, flags: tuple[str, ...], run: tuple[str, ...], ranks: int
) -> Launch:
    under_run = ("-m", "ddp_crossover", "run", *run, "--stats", folder / "stats.json") if run else ()
    saving = ("--output-dir", folder) if recipe.checkpoint else ()
    script = launched.ROOT / "docs" / "recipes" / f"{recipe.script}.py"
    launcher = () if recipe.starts_its_ranks else launched.torchrun(ranks)
    output = launched.run(
        *(*launcher, *under_run, script, "--out", folder, *recipe.arguments, *saving, *flags),
        python=python,
        variables={"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"},
        cwd=folder,
        timeout_s=LAUNCH_TIMEOUT_S,
    )
    return Launch(folder, output)


def _assert_same_final_state(ours: Launch, plain: Launch) -> None:
    assert "hid their all-gathers" not in plain.output
    for rank in range(RANKS):
        assert_same(ours.state(rank), plain.state(rank), f"rank {rank}")


def _assert_attached(recipe: Recipe, output: str) -> None:
    figures = re.search(r"\d+ of (\d+) steps hid their all-gathers(.*)", output, re.DOTALL)
    assert figures, output
    assert int(figures[1]) > 0, "no step took the pipeline"
    # Which steps overlap is a matter of time; what keeps them from it is not.
    assert ("not deferred" not in figures[2]) == recipe.defers, figures[0]


@pytest.mark.parametrize("name", often(RECIPES, "nanogpt_without_clipping", "lr_finder", "notebook"))
def test_with_its_line_a_recipe_trains_as_plain_ddp(launch: Launcher, name: str) -> None:
    recipe = RECIPES[name]
    attached = launch(recipe, "--dear")
    _assert_attached(recipe, attached.output)
    _assert_same_final_state(attached, launch(recipe))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if not recipe.starts_its_ranks])
def test_under_run_a_recipe_trains_as_plain_ddp(launch: Launcher, name: str) -> None:
    recipe = RECIPES[name]
    attached = launch(recipe, run=("--fusion-mb", "0.005"))
    _assert_same_final_state(attached, launch(recipe))
    (figures,) = json.loads((attached.folder / "stats.json").read_text())
    assert figures["pipelined_iterations"] > 0, figures
    assert (figures["deferred_steps"] > 0) == recipe.defers, figures


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name for name, recipe in RECIPES.items() if not recipe.defers and recipe.defers_with_sharded_norms]
)
def test_with_sharded_norms_a_recipe_that_clips_defers_its_updates(launch: Launcher, name: str) -> None:
    attached, plain = launch(RECIPES[name], run=("--fusion-mb", "0.005", "--norms", "sharded")), launch(RECIPES[name])
    (figures,) = json.loads((attached.folder / "stats.json").read_text())
    assert figures["deferred_steps"] > 0, figures
    for rank in range(RANKS):  # the last bits of a norm
        assert_same(attached.state(rank), plain.state(rank), f"rank {rank}", rtol=1e-3, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.checkpoint])
def test_a_recipe_resumes_as_plain_ddp_does(launch: Launcher, name: str) -> None:
    recipe = RECIPES[name]
    # Each from its own checkpoint. Not compared with a run without a break: buffers that rank 0 saves are all ranks'.
    plain, attached = (
        launch(recipe, *flags, "--resume", str(launch(recipe, *flags).folder / recipe.checkpoint))
        for flags in ((), ("--dear",))
    )
    assert "hid their all-gathers" in attached.output
    _assert_same_final_state(attached, plain)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("recipe", "exact"),
    [
        (Recipe("lightning_token_weights", needs="lightning"), ["batch"]),
        (Recipe("hf_token_weights", needs="transformers"), ["batch", "trainer"]),
    ],
    ids=["lightning", "trainer"],
)
def test_weighted_by_tokens_ranks_train_as_one_process_on_the_whole_batch(
    launch: Launcher, recipe: Recipe, exact: list[str]
) -> None:
    whole = launch(recipe, "--weights", "none", ranks=1).state(0)
    for weights in exact:
        assert_same(launch(recipe, "--weights", weights).state(1), whole, weights, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        assert_same(launch(recipe, "--weights", "none").state(1), whole, "no weights", rtol=1e-4, atol=1e-5)
