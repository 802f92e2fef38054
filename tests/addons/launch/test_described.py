"""What `verify` records of an optimizer's state is the same in two runs if, and only if, what is in it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch

from ddp_crossover.addons.launch.recording import described

pytestmark = pytest.mark.quick


class _Config:
    def __init__(self, rate: Any) -> None:
        self.rate = rate


def _leads_back(rate: float) -> _Config:
    config = _Config([rate])
    config.rate.append(config)
    return config


MAKES: dict[str, Callable[[float], Any]] = {
    "number": lambda rate: rate,
    "object": _Config,
    "leads back": _leads_back,
    "long tensor": lambda rate: (torch.arange(5000.0) * rate,),
    "array": lambda rate: np.array([rate]),
    "keys": lambda rate: {str(rate): {rate: len}},
    "nested deep": lambda rate: reduce(lambda inner, _: [inner], range(2000), rate),
}


@pytest.mark.parametrize("kind", MAKES)
def test_two_runs_agree_on_what_is_equal_and_on_nothing_else(kind: str) -> None:
    make = MAKES[kind]
    of_runs = [make(0.1), make(0.1)]  # at other addresses
    assert described(of_runs[0]) == described(of_runs[1]) != described(make(0.2))


def test_what_holds_what_counts() -> None:
    assert len({described(value) for value in ([1, [2]], [[1], 2], [1, 2], (1, 2), {1: 2}, [[1, 2]])}) == 6
