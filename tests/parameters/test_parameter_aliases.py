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
    alias_loops.detached,
    alias_loops.flat_view,
    alias_loops.flat_view_without_gradient,
    alias_loops.shallow_parameter,
    alias_loops.shallow_copy,
    alias_loops.through_dlpack,
    alias_loops.through_numpy,
    alias_loops.through_storage,
]
# A leaf's view that has a gradient function: plain torch, too, lets nobody write to it in place.
WRITABLE_ALIASES = [alias for alias in ALIASES if alias is not alias_loops.flat_view]

KEPT = {
    **{
        f"{loop.__name__}_{alias.__name__}": Case(partial(loop, alias=alias), pipelined=False)
        for loop, aliases in [
            (alias_loops.read_aliases, ALIASES),
            (alias_loops.write_aliases, WRITABLE_ALIASES),
            (alias_loops.alias_of_one, WRITABLE_ALIASES),
        ]
        for alias in aliases
    },
    "state_dict_read": Case(partial(alias_loops.kept_state_dict, writes=False), pipelined=False),
    "state_dict_written": Case(partial(alias_loops.kept_state_dict, writes=True), pipelined=False),
    "numpy_read": Case(partial(alias_loops.kept_numpy, writes=False), pipelined=False),
    "numpy_written": Case(partial(alias_loops.kept_numpy, writes=True), pipelined=False),
    "twin_for_evaluation": Case(alias_loops.twin_for_evaluation, pipelined=False),
}

MADE_IN_MID_RUN = {
    **{
        f"{loop.__name__}_{alias.__name__}": Case(partial(loop, alias=alias), pipelined=False)
        for loop in (
            alias_loops.write_aliases_made_after_attach,
            alias_loops.alias_for_a_while,
            alias_loops.alias_made_before_the_step,
        )
        for alias in (alias_loops.data, alias_loops.through_dlpack, alias_loops.through_numpy)
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
            ("read_as_one", partial(alias_loops.through_the_flat_buffer, writes=False)),
            ("written_as_one", partial(alias_loops.through_the_flat_buffer, writes=True)),
            ("neighbour", alias_loops.through_the_neighbour),
        ]
        for optimizer, made in [("sgd", SGD), ("adamw", ADAMW)]
    },
    "shared_memory_slices": Case(
        partial(alias_loops.through_the_flat_buffer, writes=True),
        model=partial(alias_loops.FlatNet, shared_memory=True),
        pipelined=False,
    ),
    "shared_memory": Case(model=alias_loops.SharedMemoryNet, pipelined=False),
    "shared_memory_in_mid_run": Case(alias_loops.shared_memory, pipelined=False),
}


@pytest.mark.parametrize(
    "case", in_turn(KEPT, quick=("read_aliases_data", "write_aliases_through_numpy", "state_dict_written"))
)
def test_an_alias_made_before_the_loop_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", in_turn(MADE_IN_MID_RUN))
def test_an_alias_made_in_mid_run_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", in_turn(ONE_STORAGE, quick=("overlapping_trained_sgd",)))
def test_parameters_over_one_storage_are_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)
