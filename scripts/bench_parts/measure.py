"""Measures one case: hands its settings to the ranks, shows their progress, reads what they have measured."""

import json
import tempfile
from pathlib import Path
from typing import Any

from bench_kit.launch import OnProgress, RunRanks, news_to, rank_environment
from bench_parts.settings import CaseSettings
from bench_parts.summary import summarize


def measure(settings: CaseSettings, run_ranks: RunRanks, on_progress: OnProgress) -> dict[str, Any]:
    """Measure one case; returns its part of the record.

    Args:
        settings: the case.
        run_ranks: runs a command once per rank.
        on_progress: told what the ranks do.

    Raises:
        CaseFailed: when a rank ended with an error.
    """

    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        settings_file, result_file = Path(directory, "settings.json"), Path(directory, "result.json")
        settings.write(settings_file)
        run_ranks(
            ["-m", "bench_parts.rank", str(settings_file), str(result_file)], rank_environment(), news_to(on_progress)
        )
        return summarize(settings, json.loads(result_file.read_text()))
