"""A checkpoint saved at any point of the loop resumes to the same bits."""

from __future__ import annotations

from functools import partial

import pytest

import resume_loops as loops
from equivalence import Case, check_case
from matrix import spread
from optimizers import grouped

RESUMED = partial(Case, steps=loops.STEPS)

RESUME = {
    "after_step": RESUMED(partial(loops.resume, after="step")),
    "after_forward": RESUMED(partial(loops.resume, after="forward")),
    "after_backward": RESUMED(partial(loops.resume, after="backward")),
    "after_step_bucket_view": RESUMED(partial(loops.resume, after="step"), ddp={"gradient_as_bucket_view": True}),
    "never_interrupted": RESUMED(loops.never_interrupted),
    "loaded_after_attach": RESUMED(partial(loops.resume, after="step", restart=loops.through_state_dicts_after_attach)),
}

# These load the state of an optimizer by the names of its parameters, for which AdamW's will do.
DISTRIBUTED_CHECKPOINT = {
    "get_state_dict": RESUMED(partial(loops.resume, after="step", restart=loops.through_get_state_dict)),
    "get_state_dict_param_groups": RESUMED(
        partial(loops.resume, after="step", restart=loops.through_get_state_dict),
        optimizer=grouped,
    ),
    "get_state_dict_before_training": Case(loops.get_state_dict_before_training),
    "distributed_checkpoint": RESUMED(
        partial(loops.resume, after="step", restart=loops.through_distributed_checkpoint)
    ),
}


@pytest.mark.parametrize("case", spread(RESUME, quick=("after_step",)))
def test_resumed_run_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", spread(DISTRIBUTED_CHECKPOINT, choose_optimizer=False))
def test_distributed_checkpoint_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)
