"""How what the fuzzer does not draw is crossed with optimizers, world sizes and strict mode:

* Each feature twice: on 2 ranks with AdamW and `strict`, or with SGD and without; and on 1, 3 or 4 ranks in the other
  mode with an optimizer out of the list in rotation (`spread`).
* Each look at a parameter once: on 2 ranks, or strict on 2 or 3 (`in_turn`).

Which of them run before each change, selection.py says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
    quick: Collection[str] = (),
) -> list[Any]:
    """Parameters for `pytest.mark.parametrize("case", ...)`: each feature as the module says.

    `choose_optimizer=False` keeps the optimizer that each case names. Of features in `quick`, the run on 2 ranks is in
    the quick selection.
    """
    # Adafactor divides by the number of elements, which most models here have a parameter without.
    rotation = [name for name in OPTIMIZERS if name != "adafactor"]
    params = []
    for index, (name, case) in enumerate(features.items()):
        on_two = ("adamw", ADAMW, 2, True) if index % 2 == 0 else ("sgd", SGD, 2, False)
        chosen = rotation[index % len(rotation)]
        others = (chosen, OPTIMIZERS[chosen], (3, 1, 4, 1)[index % 4], not on_two[3])
        for label, optimizer, world_size, strict in (on_two, others):
            if world_size in world_sizes:
                changes: dict[str, Any] = {"world_size": world_size, "strict": strict}
                if choose_optimizer:
                    changes["optimizer"] = optimizer
                words = (name, label) if choose_optimizer else (name,)
                is_quick = name in quick and world_size == 2
                params.append(_param(replace(case, **changes), *words, is_quick=is_quick))
    return params


def in_turn(features: Mapping[str, Case], quick: Collection[str] = ()) -> list[Any]:
    """Parameters for `pytest.mark.parametrize("case", ...)`: each feature once, with the optimizer that it names, on 2
    ranks or strict on 2 or 3. Those in `quick` are in the quick selection.
    """
    modes = ((3, True), (2, True), (2, False))
    return [
        _param(replace(case, world_size=world_size, strict=strict), name, is_quick=name in quick)
        for index, (name, case) in enumerate(features.items())
        for world_size, strict in (modes[index % len(modes)],)
    ]


def often(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: these values, of which all but the chosen run at night only."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in chosen else pytest.mark.nightly
        )
        for value in values
    ]


def _param(case: Case, *words: str, is_quick: bool) -> Any:
    mode = ("strict",) if case.strict else ()
    marks = [pytest.mark.quick] if is_quick else []
    return pytest.param(case, id="-".join((*words, f"{case.world_size}ranks", *mode)), marks=marks)
