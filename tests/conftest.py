"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import RankPool


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.kill()


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
        _pools[world_size] = pool
        return results

    return run
