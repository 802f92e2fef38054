"""A script that reads or writes parameters by itself between `optimizer.step()` and the next forward gets
what it gets under plain DDP, whatever it holds them by.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import stale_averages
import stale_copies
import stale_loops
import stale_readers
from equivalence import SGD, Case, Run, check_case, plain_loop, run_arm
from matrix import in_turn
from models import DeepNet, MatrixNet
from optimizers import MUON

# Loops that touch every parameter right after the step have nothing left to overlap, hence `pipelined=False`. Plain
# reads, writes, copies and averages the fuzzer draws (`parameters_*`, `module_*`, `average`).
WRITES = {
    **{
        f"post_hook_{'writes' if writes else 'reads'}_{'after' if after else 'before'}_attach": Case(
            partial(stale_loops.step_post_hook, writes=writes, after_attach=after), pipelined=False
        )
        for writes in (False, True)
        for after in (False, True)
    },
    "post_hook_of_all_optimizers": Case(stale_loops.step_post_hook_of_all_optimizers, pipelined=False),
    "foreach": Case(stale_loops.foreach_over_a_list, pipelined=False),
    "numpy": Case(stale_loops.through_numpy, optimizer=SGD, pipelined=False),
    "second_optimizer": Case(stale_loops.second_optimizer, pipelined=False),
    "broadcast_parameters": Case(stale_loops.broadcast_parameters_themselves, pipelined=False),
    "average_over_ranks": Case(stale_loops.average_over_ranks, pipelined=False),
}

AVERAGES = {
    "torch_ema": Case(stale_averages.average_of_torch_ema, pipelined=False),
    "ema_pytorch": Case(stale_averages.average_of_ema_pytorch, pipelined=False),
    "timm_v2": Case(partial(stale_averages.average_of_timm, version=2), pipelined=False),
    "timm_v3": Case(partial(stale_averages.average_of_timm, version=3), pipelined=False),
    "lora": Case(stale_averages.evaluate_every_third_step, model=stale_averages.LoraNet),
    "sam_subtracts": Case(partial(stale_averages.sharpness_aware, replaces_data=False), pipelined=False),
    "sam_replaces": Case(partial(stale_averages.sharpness_aware, replaces_data=True), pipelined=False),
    "momentum_encoder": Case(model=stale_averages.MomentumEncoderNet, pipelined=False),
}

COPIES = {
    **{
        f"parameter_{how.__name__}": Case(partial(stale_copies.train_a_copied_parameter, copied=how), pipelined=False)
        for how in (stale_copies.by_deepcopy, stale_copies.by_pickle, stale_copies.by_save)
    },
    "same_type": Case(stale_copies.make_another_of_the_same_type, pipelined=False),
    "replace_data_unread": Case(stale_copies.replace_data_unread, pipelined=False),
    "exchange_data": Case(stale_copies.exchange_data, model=DeepNet, pipelined=False),
    "swap_with_another": Case(stale_copies.swap_with_another, pipelined=False),
    "hooked_norms": Case(stale_copies.read_computed_weights, model=stale_copies.HookedNormNet, pipelined=False),
    "pruned": Case(stale_copies.read_computed_weights, model=stale_copies.PrunedNet, pipelined=False),
}

READERS = {
    "detached_regularizer": Case(model=stale_readers.DetachedRegularizerNet),
    "traced": Case(stale_readers.traced, model=partial(DeepNet, bias=False), pipelined=False),
    "exported": Case(stale_readers.exported, pipelined=False),
    "compiled_after_a_reset": Case(stale_readers.compiled_after_a_reset, pipelined=False),
    "identity": Case(stale_readers.identity, pipelined=False),
    "attributes_of_parameters": Case(stale_readers.attributes_of_parameters),
    "requires_grad_toggled": Case(stale_readers.requires_grad_toggled, pipelined=False),
    **{
        f"count_flops_{'run' if whole_loop else 'step'}": Case(
            partial(stale_readers.count_flops, whole_loop=whole_loop), model=MatrixNet, optimizer=MUON
        )
        for whole_loop in (False, True)
    },
    "write_in_inference_mode": Case(stale_readers.write_in_inference_mode, pipelined=False),
    "print_parameters": Case(stale_readers.print_parameters, pipelined=False),
}


@pytest.mark.parametrize("case", in_turn(WRITES, quick=("numpy",)))
def test_what_a_script_writes_to_parameters_stays(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", in_turn(AVERAGES, quick=("sam_replaces",)))
def test_averages_and_outer_optimizers_see_updated_parameters(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", in_turn(COPIES, quick=("parameter_by_save",)))
def test_copied_replaced_and_computed_parameters_are_updated_ones(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", in_turn(READERS, quick=("identity",)))
def test_whoever_looks_at_a_parameter_sees_its_update(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


def _average_without_asking(run: Run) -> Iterator[Any]:
    averaged = AveragedModel(run.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for loss in plain_loop(run):
        averaged.update_parameters(run.model.module)
        yield loss


def _looks(case: Case) -> dict[str, int]:
    _, _, stats = run_arm(case, with_dear=True)
    return dict(stats.looks)


def test_the_line_that_looks_at_parameters_is_named(on_ranks) -> None:
    [looks] = on_ranks(_looks, 1, Case(_average_without_asking, model=DeepNet, world_size=1))
    look, steps = max(looks.items(), key=lambda one: one[1])
    assert look.startswith(f"{Path(__file__).name}:") and "reads or writes parameters" in look
    assert steps > Case().steps // 2
