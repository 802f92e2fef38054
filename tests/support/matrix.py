"""How features are crossed with optimizers, world sizes and strict mode.

The full product would be some 20,000 runs. What is run, and why that is enough:

* Each feature four times: on 1, 2 and 3 or 4 ranks and both with and without `strict`, with AdamW,
  with SGD, and with two optimizers out of the list in rotation (`spread`).
* Each optimizer on 2 ranks, strict, with half of the features that concern the update itself, in
  a checkerboard (test_equivalence_optimizers.py).

Left out: pairs of two features, except those that are named as a feature of their own, and pairs of
an optimizer with a feature that changes only which module runs when, beyond the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from equivalence import ADAMW, SGD, Case
from optimizers import OPTIMIZERS

ALL_WORLD_SIZES = (1, 2, 3, 4)


def spread(
    features: Mapping[str, Case],
    world_sizes: Sequence[int] = ALL_WORLD_SIZES,
    choose_optimizer: bool = True,
) -> list[Any]:
    """Parameters for `pytest.mark.parametrize("case", ...)`: each feature as the module says.

    `choose_optimizer=False` keeps the optimizer that each case names.
    """
    # Adafactor divides by the number of elements, which most models here have a parameter without.
    rotation = [name for name in OPTIMIZERS if name != "adafactor"]
    params = []
    for index, (name, case) in enumerate(features.items()):
        runs = [
            ("adamw", ADAMW, 2, True),
            ("sgd", SGD, 2, False),
            *(
                (chosen, OPTIMIZERS[chosen], world_size, strict)
                for offset, world_size, strict in [(0, 1, True), (1, 3 + index % 2, index % 4 < 2)]
                for chosen in [rotation[(2 * index + offset) % len(rotation)]]
            ),
        ]
        for chosen, optimizer, world_size, strict in runs:
            if world_size not in world_sizes:
                continue
            changes: dict[str, Any] = {"world_size": world_size, "strict": bool(strict)}
            if choose_optimizer:
                changes["optimizer"] = optimizer
            label = f"{name}-{chosen}" if choose_optimizer else name
            label += f"-{world_size}ranks" + ("-strict" if strict else "")
            params.append(pytest.param(replace(case, **changes), id=label))
    return params


def in_both_modes(features: Mapping[str, Case]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize("case", ...)`: each feature on 2 ranks with and without
    `strict`, every third one on 3 ranks as well, each with the optimizer that it names.
    """
    params = []
    for index, (name, case) in enumerate(features.items()):
        runs = [(2, False), (2, True)] + ([(3, True)] if index % 3 == 0 else [])
        for world_size, strict in runs:
            label = f"{name}-{world_size}ranks" + ("-strict" if strict else "")
            params.append(pytest.param(replace(case, world_size=world_size, strict=strict), id=label))
    return params
