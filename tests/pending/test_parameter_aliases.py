"""Other tensors over a parameter's memory, which nobody asks before they are read or written to, show and
keep what they do under plain DDP.
"""

from __future__ import annotations

from functools import partial

import pytest

import alias_loops
from equivalence import ADAMW, SGD, Case, check_case, plain_loop
from matrix import in_turn

ALIASES = [
    alias_loops.data,
    alias_loops.flat_view,
    alias_loops.shallow_parameter,
    alias_loops.through_dlpack,
    alias_loops.through_numpy,
    alias_loops.through_storage,
]

KEPT = {
    **{
        f"aliases_{alias.__name__}": Case(partial(alias_loops.aliases_made_before, alias=alias), pipelined=False)
        for alias in ALIASES
    },
    "state_dict": Case(alias_loops.kept_state_dict, pipelined=False),
    "numpy": Case(alias_loops.kept_numpy, pipelined=False),
    "twin_for_evaluation": Case(alias_loops.twin_for_evaluation, pipelined=False),
}

MADE_IN_MID_RUN = {
    **{
        f"{loop.__name__}_{alias.__name__}": Case(partial(loop, alias=alias), pipelined=False)
        for loop in (
            alias_loops.aliases_made_after_attach,
            alias_loops.alias_for_a_while,
            alias_loops.alias_made_before_the_step,
        )
        for alias in (alias_loops.data, alias_loops.through_dlpack)
    },
    "alias_made_in_forward": Case(alias_loops.alias_made_in_forward, pipelined=False),
}

ONE_STORAGE = {
    **{
        f"{'overlapping' if overlap else 'disjoint'}_{name}_{optimizer}": Case(
            loop, model=partial(alias_loops.FlatNet, overlap), optimizer=made, pipelined=False
        )
        for overlap in (0, 2)
        for name, loop in [
            ("trained", plain_loop),
            ("used_as_one", alias_loops.through_the_flat_buffer),
            ("neighbour", alias_loops.through_the_neighbour),
        ]
        for optimizer, made in [("sgd", SGD), ("adamw", ADAMW)]
    },
    "shared_memory": Case(
        alias_loops.through_the_flat_buffer,
        model=partial(alias_loops.FlatNet, shared_memory=True),
        pipelined=False,
    ),
    "shared_memory_in_mid_run": Case(alias_loops.shared_memory, pipelined=False),
}


@pytest.mark.parametrize("case", in_turn(KEPT, quick=("aliases_data", "aliases_through_numpy", "state_dict")))
def test_an_alias_made_before_the_loop_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", in_turn(MADE_IN_MID_RUN))
def test_an_alias_made_in_mid_run_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", in_turn(ONE_STORAGE, quick=("overlapping_trained_sgd",)))
def test_parameters_over_one_storage_are_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)
