"""Measures one case on all ranks. A rank runs `python -m bench_kit.on_ranks CASE RESULT`, in torchrun's environment."""

import json
import pickle
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench_kit.launch import OnProgress, RunRanks, news_to, rank_environment

TIMEOUT = timedelta(seconds=120)


def measure_on_ranks(
    measure: Callable[[Any], Any], settings: Any, run_ranks: RunRanks, on_progress: OnProgress = lambda *_: None
) -> Any:
    """Call `measure(settings)` on every rank, within a process group; returns what it gives rank 0, which must be JSON.

    Args:
        measure: a function of a module.
        settings: the case.
        run_ranks: runs a command once per rank.
        on_progress: told what the ranks `tell`.

    Raises:
        CaseFailed: when a rank ended with an error.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        case, result = Path(directory, "case.pickle"), Path(directory, "result.json")
        case.write_bytes(pickle.dumps((measure, settings)))
        run_ranks(["-m", "bench_kit.on_ranks", str(case), str(result)], rank_environment(), news_to(on_progress))
        return json.loads(result.read_text())


def main(case: Path, result: Path) -> None:
    """Run one rank; rank 0 writes the result."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    measure, settings = pickle.loads(case.read_bytes())
    measured = measure(settings)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
