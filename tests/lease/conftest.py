"""Fixtures of the lease's tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lease_processes import LeaseProcesses


@pytest.fixture
def lease_directory() -> Iterator[Path]:
    # Not tmp_path: the path of a socket has at most 107 bytes. mkdtemp makes it 0700.
    directory = Path(tempfile.mkdtemp(prefix="lease-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def processes(lease_directory: Path) -> Iterator[LeaseProcesses]:
    made = LeaseProcesses(lease_directory)
    yield made
    made.end()
