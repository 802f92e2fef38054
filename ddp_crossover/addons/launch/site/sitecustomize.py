"""Imported by Python when an interpreter starts in which a script is to be attached to; see ``addons.launch.errand``.

Loads torch in no process that does not load it by itself.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent
_PACKAGE = _HERE.parents[2]
_DDP_MODULE = "torch.nn.parallel.distributed"


class _WhenDdpIsImported(MetaPathFinder):
    """Runs the errand as soon as torch's DDP module has been executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _DDP_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                execute(module)
                from ddp_crossover.addons.launch.begin import run_errand

                run_errand(module.DistributedDataParallel)

            loader.exec_module = execute_and_watch
        return spec


def _import_the_one_that_is_hidden() -> None:
    """Import the system's own ``sitecustomize``, which this file hides."""
    others = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _begin() -> None:
    if importlib.util.find_spec(_PACKAGE.name) is None:
        sys.path.append(str(_PACKAGE.parent))  # run from a checkout
    from ddp_crossover.addons.launch.errand import errand_of_process, seed

    if (errand := errand_of_process()) is not None:
        seed(errand)
        sys.meta_path.insert(0, _WhenDdpIsImported())


_begin()
_import_the_one_that_is_hidden()
