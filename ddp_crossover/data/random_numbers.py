"""Whether code has drawn from the global generators of random numbers, of which there are three."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RandomNumbers:
    """The state of Python's, NumPy's and torch's global generators at one moment."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()
        self._torch = torch.get_rng_state()

    def have_been_drawn(self) -> bool:
        """Whether any of the generators has moved on since."""
        return not (
            random.getstate() == self._python
            and _numpy_state() == self._numpy
            and torch.equal(torch.get_rng_state(), self._torch)
        )


def _numpy_state() -> Any:
    """In values that can be compared; the user may have set another bit generator."""
    state: Any = np.random.get_state(legacy=False)
    of_generator = state["state"].items()
    return state | {"state": {n: one.tobytes() if isinstance(one, np.ndarray) else one for n, one in of_generator}}
