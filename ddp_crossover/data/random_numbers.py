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
        self._numpy: Any = np.random.get_state(legacy=True)
        self._torch = torch.get_rng_state()

    def have_been_drawn(self) -> bool:
        """Whether any of the generators has moved on since."""
        now: Any = np.random.get_state(legacy=True)
        return not (
            random.getstate() == self._python
            and now[2:] == self._numpy[2:]
            and bool((now[1] == self._numpy[1]).all())
            and torch.equal(torch.get_rng_state(), self._torch)
        )
