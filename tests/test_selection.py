"""The cases that run before each change: some of each test, spread over its list."""

from __future__ import annotations

from itertools import pairwise

import pytest

from selection import chosen_cases


@pytest.mark.parametrize("test", ["tests/a.py::test_a", "tests/b.py::test_b", "tests/c.py::test_c"])
def test_of_every_test_some_cases_run_and_of_many_a_quarter(test: str) -> None:
    for count in range(1, 200):
        chosen = chosen_cases(test, count)
        assert chosen == chosen_cases(test, count)
        assert max(1, count // 5) <= len(chosen) <= count // 4 + 2
        # No gap leaves out what stands together in a list, and both of two values that alternate are there.
        gaps = [later - sooner for sooner, later in pairwise(chosen)]
        assert max(gaps, default=0) <= 5
    assert {number % 2 for number in chosen} == {0, 1}
    assert {number % 3 for number in chosen} == {0, 1, 2}
