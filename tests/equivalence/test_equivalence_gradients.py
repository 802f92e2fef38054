"""Whoever reads, clips, scales or edits `.grad` sees and gets what plain DDP gives.

The stock functions need the reduced gradients before the step, so these runs give up the overlap
they ask back and are not required to count as pipelined. Our own clipping is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import gradient_loops as loops
from equivalence import SGD, Case, check_case
from matrix import spread
from models import OddNet

BUCKET_VIEWS = {"gradient_as_bucket_view": True}
INFINITY = float("inf")
# The stock function knows no largest element of an empty gradient.
WITHOUT_EMPTY = partial(OddNet, empty_parameter=False)

GRADIENTS = {
    "clip_norm": loops.clip_norm,
    "clip_norm_foreach": partial(loops.clip_norm, foreach=True),
    "clip_norm_loop": partial(loops.clip_norm, foreach=False),
    "clip_norm_inactive": partial(loops.clip_norm, max_norm=loops.INACTIVE_NORM),
    "clip_norm_of_one_layer": loops.clip_norm_of_one_layer,
    "clip_value": loops.clip_value,
    "clip_accumulated": loops.clip_accumulated,
    "log_norms_before_step": loops.log_norms_before_step,
    "log_one_gradient_sometimes": loops.log_one_gradient_sometimes,
    "log_gradients_after_step": loops.log_gradients_after_step,
    "scale_gradients_in_place": loops.scale_gradients_in_place,
    "scale_one_gradient_in_place": loops.scale_one_gradient_in_place,
    "replace_gradients": loops.replace_gradients,
    "drop_a_gradient": loops.drop_a_gradient,
    "spoil_gradients_after_step": loops.spoil_gradients_after_step,
    "hold_on_to_gradients": loops.hold_on_to_gradients,
    "scale_in_tensor_hooks": loops.scale_in_tensor_hooks,
    "nan_in_one_rank": loops.nan_in_one_rank,
    "inf_in_one_parameter": loops.inf_in_one_parameter,
}

READERS = {name: Case(loop, pipelined=False) for name, loop in GRADIENTS.items()}
READERS["clip_norm_max"] = Case(partial(loops.clip_norm, norm_type=INFINITY), model=WITHOUT_EMPTY, pipelined=False)
READERS_OF_VIEWS = {
    f"{name}_bucket_view": Case(GRADIENTS[name], pipelined=False, ddp=BUCKET_VIEWS)
    for name in ("clip_norm", "log_gradients_after_step", "scale_gradients_in_place")
}
READERS_OF_VIEWS["spoil_gradients_after_step_bucket_view"] = Case(
    loops.spoil_gradients_after_step, pipelined=False, ddp=BUCKET_VIEWS
)

# One sum over shards instead of one over parameters: the norm, and all that is multiplied by it,
# may differ in the last bits.
OWN_CLIPPING = {
    "clip_on_shards": Case(loops.clip_norm_on_shards, exact=False),
    "clip_on_shards_max": Case(
        partial(loops.clip_norm_on_shards, norm_type=INFINITY), model=WITHOUT_EMPTY, exact=False
    ),
    "clip_on_shards_norm_3": Case(partial(loops.clip_norm_on_shards, norm_type=3.0), exact=False),
    "clip_on_shards_bucket_view": Case(loops.clip_norm_on_shards, exact=False, ddp=BUCKET_VIEWS),
}


@pytest.mark.parametrize(
    "case", spread(READERS | READERS_OF_VIEWS, quick=("clip_norm", "replace_gradients", "hold_on_to_gradients"))
)
def test_reading_and_editing_gradients_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


# Adam divides a gradient by its own size: from a norm in the last bits different, entries near zero
# make steps of full length into another direction. Only a linear optimizer can be held to a
# tolerance.
@pytest.mark.parametrize(
    ("world_size", "strict"),
    [(1, True), (2, False), (3, True), (4, False)],
    ids=["1-strict", "2-relaxed", "3-strict", "4-relaxed"],
)
@pytest.mark.parametrize("name", OWN_CLIPPING)
def test_own_clipping_clips_as_the_stock_function(on_ranks, name, world_size, strict) -> None:
    case = replace(OWN_CLIPPING[name], world_size=world_size, strict=strict, optimizer=SGD)
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", spread({"inactive": Case(loops.clip_norm_on_shards_inactive)}))
def test_own_clipping_changes_nothing_when_there_is_nothing_to_clip(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)
