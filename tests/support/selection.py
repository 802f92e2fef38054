"""Which cases of a test run before each change, and which at night only.

A case on ranks costs most of a processor second, one that starts ranks or interpreters several, and there are thousands
of them: of each such test a quarter of the cases runs before each change, at least one, always the same. They are
spread over the whole list by multiples of the golden ratio, which keep no step with lists that are crossed, and begin
where the test's name says, so that short lists do not all run their first case. `-m nightly` runs the others, and most
meetings of features are the fuzzer's.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

SHARE = 1 / 4
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_COSTLY = {"on_ranks", "script_server"}  # fixtures; what starts processes by itself is marked `launches`
_CHOSEN_BY_HAND = ("quick", "nightly")


def leave_to_the_night(items: Iterable[pytest.Item]) -> None:
    """Mark as `nightly` what does not run before each change, of the tests that have several cases on ranks."""
    cases = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and _is_costly(item):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, of_test in cases.items():
        chosen = set(chosen_cases(name, len(of_test)))
        for number, item in enumerate(of_test):
            if number not in chosen and not any(item.get_closest_marker(mark) for mark in _CHOSEN_BY_HAND):
                item.add_marker(pytest.mark.nightly)


def _is_costly(item: pytest.Function) -> bool:
    return bool(_COSTLY & set(item.fixturenames)) or item.get_closest_marker("launches") is not None


def chosen_cases(test: str, count: int) -> list[int]:
    """Numbers of the cases of a test that run before each change, of ``count``."""
    begin = zlib.crc32(test.encode()) / 2**32
    places = [(begin + number * _GOLDEN_RATIO) % 1 for number in range(count)]
    return [number for number, place in enumerate(places) if place < SHARE] or [places.index(min(places))]
