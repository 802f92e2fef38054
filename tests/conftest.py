"""Fixtures shared by all tests."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness import RankPool
from script_server import ScriptServer
from selection import leave_to_the_night

_OF_GROUP = re.compile(r"@[\w ]+$")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cases to the night, but for a test that is named. Begin with what stays together on one worker, since it
    shares a launch or is one: it would be the last to end.
    """
    if not any("::" in argument for argument in config.args):
        leave_to_the_night(items)
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to go on if xdist could not mark groups: each worker would start what one is to start for all."""
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group") is not None]
    are_marked = all(_OF_GROUP.search(item.nodeid) for item in grouped)
    if getattr(session.config.option, "loadgroup", False) and not are_marked:
        raise pytest.UsageError(
            f"pytest-xdist makes no groups with pytest {pytest.__version__}: install what pyproject.toml names"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Cut off the group that xdist has put behind a test's name, by which `--last-failed` would not find it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker's own reports keep the names that it has collected
        report.nodeid = _OF_GROUP.sub("", report.nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the timeout's wrapper: time spent waiting does not count
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test that is marked `alone` wait until no other worker runs a test, and others wait until it is over."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    shared_by_workers = Path(item.config.option.basetemp).parent
    shared_by_workers.mkdir(parents=True, exist_ok=True)
    with _turn(shared_by_workers / "turn", alone=item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def _turn(path: Path, *, alone: bool) -> Iterator[None]:
    # Two locks: with one, tests that run together could keep a test that waits to be alone waiting for ever.
    with open(f"{path}.gate", "w") as gate, open(f"{path}.lock", "w") as lock:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may keep the file open


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.kill()


@pytest.fixture(scope="session")
def script_server() -> Iterator[ScriptServer]:
    """Runs complete scripts, in interpreters that end as a user's does."""
    server = ScriptServer()
    yield server
    server.close()


@pytest.fixture
def on_ranks(_pools: dict[int, RankPool]) -> Callable[..., list[Any]]:
    """`on_ranks(fn, world_size, *args)`: as `run_ranks`, on ranks that live on for the next test."""

    def run(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        # Taken out while it runs, put back only if nothing failed: a pool that failed is not used
        # again.
        pool = _pools.pop(world_size, None) or RankPool(world_size)
        try:
            results = pool.run(fn, *args, **options)
        except BaseException:
            pool.kill()
            raise
        if pool.is_spent:
            pool.kill()
        else:
            _pools[world_size] = pool
        return results

    return run
