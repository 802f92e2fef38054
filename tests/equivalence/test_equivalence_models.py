"""Every shape of model trains as under plain DDP.

Left out: SyncBatchNorm, which PyTorch itself supports on GPUs only.
"""

from __future__ import annotations

from functools import partial

import pytest

import models
import wirings
from equivalence import Case, check_case
from forward_loops import evaluate_between_steps
from matrix import spread

FIND_UNUSED = {"find_unused_parameters": True}

MODELS = {
    "deep": Case(model=models.DeepNet),
    "matrices": Case(model=models.MatrixNet),
    "batch_norm": Case(model=models.BatchNormNet),
    "batch_norm_evaluated": Case(evaluate_between_steps, model=models.BatchNormNet),
    "batch_norm_unbroadcast": Case(model=models.BatchNormNet, ddp={"broadcast_buffers": False}),
    "channels_last": Case(model=models.ChannelsLastNet),
    "channels_last_bucket_view": Case(model=models.ChannelsLastNet, ddp={"gradient_as_bucket_view": True}),
    "tied": Case(model=wirings.TiedNet),
    "attention": Case(model=wirings.AttentionNet),
    "transformer": Case(model=wirings.TransformerNet),
    "transformer_evaluated": Case(evaluate_between_steps, model=wirings.TransformerNet),
    "borrowed_weight": Case(model=wirings.BorrowedWeightNet),
    "root_parameters": Case(model=wirings.RootParameterNet),
    "root_parameters_evaluated": Case(evaluate_between_steps, model=wirings.RootParameterNet),
    "weight_norm": Case(model=wirings.WeightNormNet),
    "frozen": Case(model=models.FrozenNet),
    "registered_in_reverse": Case(model=wirings.ReversedNet),
    "shuffled_every_time": Case(model=wirings.ShuffledNet),
    "layer_called_twice": Case(model=wirings.TwiceNet),
    "skipping_layers": Case(model=wirings.SkippingNet, ddp=FIND_UNUSED),
    "skipping_layers_bucket_view": Case(model=wirings.SkippingNet, ddp=FIND_UNUSED | {"gradient_as_bucket_view": True}),
    "skipping_layers_apart": Case(model=partial(wirings.SkippingNet, apart=True), ddp=FIND_UNUSED),
    "nothing_unused_but_searched_for": Case(ddp=FIND_UNUSED),
    "static_graph": Case(model=models.DeepNet, ddp={"static_graph": True}),
    "static_graph_called_twice": Case(model=wirings.TwiceNet, ddp={"static_graph": True}),
    "static_graph_one_unused": Case(model=wirings.HalfUsedNet, ddp={"static_graph": True}),
    "checkpoint": Case(model=partial(wirings.CheckpointNet, use_reentrant=False)),
    "checkpoint_reentrant": Case(model=partial(wirings.CheckpointNet, use_reentrant=True), ddp={"static_graph": True}),
    "checkpoint_reentrant_dynamic": Case(model=partial(wirings.CheckpointNet, use_reentrant=True)),
}


@pytest.mark.parametrize(
    "case", spread(MODELS, quick=("tied", "checkpoint", "skipping_layers", "frozen", "batch_norm_evaluated"))
)
def test_model_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)
