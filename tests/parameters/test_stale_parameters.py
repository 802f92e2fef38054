"""A script that reads or writes parameters by itself between `optimizer.step()` and the next forward gets
what it gets under plain DDP, whatever it holds them by.
"""

from __future__ import annotations

from functools import partial

import pytest

import stale_averages
import stale_copies
import stale_loops
import stale_readers
from equivalence import SGD, Case, check_case
from matrix import in_turn
from models import DeepNet, FrozenNet, MatrixNet
from optimizers import MUON
from wirings import WeightNormNet

# Loops that touch every parameter right after the step have nothing left to overlap, hence `pipelined=False`.
WRITES = {
    "clip_one_of_many": Case(stale_loops.clip_one_of_many),
    **{
        f"post_hook_{'writes' if writes else 'reads'}_{'after' if after else 'before'}_attach": Case(
            partial(stale_loops.step_post_hook, writes=writes, after_attach=after), pipelined=False
        )
        for writes in (False, True)
        for after in (False, True)
    },
    "post_hook_of_all_optimizers": Case(stale_loops.step_post_hook_of_all_optimizers, pipelined=False),
    "clamp_the_temperature": Case(stale_loops.clamp_the_temperature, model=stale_loops.TemperatureNet),
    "limit_norms_of_rows": Case(stale_loops.limit_norms_of_rows, pipelined=False),
    "standardize_by_copy": Case(stale_loops.standardize_by_copy, pipelined=False),
    "foreach": Case(stale_loops.foreach_over_a_list, pipelined=False),
    "numpy": Case(stale_loops.through_numpy, optimizer=SGD, pipelined=False),
    "gradients_through_parameters": Case(stale_loops.gradients_through_parameters, pipelined=False),
    "second_optimizer": Case(partial(stale_loops.second_optimizer, foreach=False), pipelined=False),
    "second_optimizer_foreach": Case(partial(stale_loops.second_optimizer, foreach=True), pipelined=False),
    "broadcast_data": Case(stale_loops.broadcast_from_the_last_rank, pipelined=False),
    "broadcast_parameters": Case(stale_loops.broadcast_parameters_themselves, pipelined=False),
    "average_over_ranks": Case(stale_loops.average_over_ranks, pipelined=False),
}

AVERAGES = {
    "own_list": Case(stale_averages.average_over_an_own_list, pipelined=False),
    "lerp": Case(stale_averages.average_by_lerp, pipelined=False),
    "torch_ema": Case(stale_averages.average_of_torch_ema, pipelined=False),
    "ema_pytorch": Case(stale_averages.average_of_ema_pytorch, pipelined=False),
    "timm_v2": Case(partial(stale_averages.average_of_timm, version=2), pipelined=False),
    "timm_v3": Case(partial(stale_averages.average_of_timm, version=3), pipelined=False),
    "lora": Case(stale_averages.evaluate_every_third_step, model=stale_averages.LoraNet),
    "lookahead": Case(stale_averages.lookahead, optimizer=SGD, pipelined=False),
    "sam_subtracts": Case(partial(stale_averages.sharpness_aware, replaces_data=False), pipelined=False),
    "sam_replaces": Case(partial(stale_averages.sharpness_aware, replaces_data=True), pipelined=False),
    "momentum_encoder": Case(model=stale_averages.MomentumEncoderNet, pipelined=False),
    "target_network": Case(stale_averages.target_network, pipelined=False),
    "hard_target_network": Case(stale_averages.hard_target_network, pipelined=False),
}

COPIES = {
    **{
        f"{what}_{how.__name__}": Case(partial(loop, copied=how), pipelined=False)
        for what, loop in [
            ("module", stale_copies.train_a_copied_module),
            ("parameter", stale_copies.train_a_copied_parameter),
        ]
        for how in (stale_copies.by_deepcopy, stale_copies.by_pickle, stale_copies.by_save)
    },
    "shallow_copy": Case(stale_copies.write_through_a_shallow_copy, pipelined=False),
    "same_type": Case(stale_copies.make_another_of_the_same_type, pipelined=False),
    "keep_state_dicts": Case(stale_copies.keep_state_dicts, pipelined=False),
    "replace_data_unread": Case(stale_copies.replace_data_unread, pipelined=False),
    "replace_frozen_by_set": Case(stale_copies.replace_frozen_by_set, model=FrozenNet),
    "exchange_data": Case(stale_copies.exchange_data, model=DeepNet, pipelined=False),
    "swap_with_another": Case(stale_copies.swap_with_another, pipelined=False),
    "swap_frozen": Case(stale_copies.swap_frozen, model=FrozenNet),
}

COMPUTED_WEIGHTS = {
    "weight_norm": Case(stale_copies.read_computed_weights, model=WeightNormNet, pipelined=False),
    "hooked_norms": Case(model=stale_copies.HookedNormNet, pipelined=False),
    "hooked_norms_one_layer": Case(stale_copies.call_one_layer, model=stale_copies.HookedNormNet, pipelined=False),
    "pruned": Case(stale_copies.read_computed_weights, model=stale_copies.PrunedNet, pipelined=False),
    "pruned_one_layer": Case(stale_copies.call_one_layer, model=stale_copies.PrunedNet, pipelined=False),
    "prune_in_mid_run": Case(stale_copies.prune_in_mid_run, pipelined=False),
    "make_pruning_permanent": Case(stale_copies.make_pruning_permanent, pipelined=False),
}

READERS = {
    "late_regularizer": Case(model=stale_readers.LateRegularizerNet),
    "detached_regularizer": Case(model=stale_readers.DetachedRegularizerNet),
    "functional_calls": Case(stale_readers.functional_calls, pipelined=False),
    "functional_gradients": Case(stale_readers.functional_gradients, pipelined=False),
    "per_sample_gradients": Case(stale_readers.per_sample_gradients, pipelined=False),
    "mapped_over_the_batch": Case(stale_readers.mapped_over_the_batch, pipelined=False),
    "mapped_over_a_parameter": Case(stale_readers.mapped_over_a_parameter, pipelined=False),
    "functionalized": Case(stale_readers.functionalized, pipelined=False),
    "traced": Case(stale_readers.traced, model=partial(DeepNet, bias=False), pipelined=False),
    "exported": Case(stale_readers.exported, pipelined=False),
    "compiled_after_a_reset": Case(stale_readers.compiled_after_a_reset, pipelined=False),
    "identity": Case(stale_readers.identity, pipelined=False),
    "attributes_of_parameters": Case(stale_readers.attributes_of_parameters),
    "requires_grad_toggled": Case(stale_readers.requires_grad_toggled, pipelined=False),
    "default_device": Case(stale_readers.default_device, pipelined=False),
    **{
        f"count_flops_{name}_{'run' if whole_loop else 'step'}": Case(
            partial(stale_readers.count_flops, whole_loop=whole_loop), model=MatrixNet, optimizer=made
        )
        for name, made in [("sgd", SGD), ("muon", MUON)]
        for whole_loop in (False, True)
    },
    "read_in_inference_mode": Case(stale_readers.read_in_inference_mode, pipelined=False),
    "write_in_inference_mode": Case(stale_readers.write_in_inference_mode, pipelined=False),
    "print_parameters": Case(stale_readers.print_parameters, pipelined=False),
    "save_only_tensors": Case(stale_readers.save_only_tensors, pipelined=False),
}


@pytest.mark.parametrize("case", in_turn(WRITES, quick=("numpy",)))
def test_what_a_script_writes_to_parameters_stays(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", in_turn(AVERAGES, quick=("own_list",)))
def test_averages_targets_and_outer_optimizers_see_updated_parameters(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", in_turn(COPIES, quick=("keep_state_dicts",)))
def test_copied_saved_and_replaced_parameters_are_plain_and_updated(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", in_turn(COMPUTED_WEIGHTS))
def test_weights_computed_outside_of_forward_are_computed_from_updated_parameters(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", in_turn(READERS, quick=("functional_calls", "identity")))
def test_whoever_looks_at_a_parameter_sees_its_update(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)
