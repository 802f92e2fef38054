"""What is written beside the samples of a cache, for people: which data set they are of."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

ABOUT = "about.json"
FORMAT_VERSION = 3
_LONGEST = 200


def write_about(directory: Path, dataset: Any, cached: Any, length: int) -> None:
    """Say what this is a cache of. Failures do not matter."""
    path = directory / ABOUT
    if path.exists():
        return
    about = {
        "dataset": _line(dataset),
        "cached": _line(cached),
        "samples": length,
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    partial = path.with_name(f"{ABOUT}.{os.getpid()}")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(about, indent=2))
        partial.replace(path)


def read_about(directory: Path) -> dict[str, Any]:
    """What `write_about` wrote; empty if that cannot be read."""
    try:
        about = json.loads((directory / ABOUT).read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _line(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
