"""Every way of writing the training loop gives what it gives under plain DDP."""

from __future__ import annotations

from functools import partial

import pytest

import forward_loops
import loops
from equivalence import Case, check_case
from matrix import spread
from models import DeepNet, DropoutNet
from optimizers import (
    grouped,
    grouped_sgd,
    interleaved_optimizers,
    partial_optimizer,
    two_optimizers,
)
from wirings import SkippingNet

BUCKET_VIEWS = {"gradient_as_bucket_view": True}

LOOPS = {
    "plain": Case(),
    "bucket_view": Case(ddp=BUCKET_VIEWS),
    "many_small_buckets": Case(model=DeepNet, ddp={"bucket_cap_mb": 1e-4}),
    "one_large_group": Case(model=DeepNet, dear={"fusion_mb": 25}),
    "plan_by_default": Case(model=DeepNet, dear={"fusion_mb": None}, steps=20),  # until trials begin
    "papers_schedule": Case(model=DeepNet, dear={"schedule": "dear"}),
    "dropout": Case(model=DropoutNet),
    "zero_grad_keeping_memory": Case(loops.zero_grad_keeping_memory),
    "zero_grad_keeping_memory_bucket_view": Case(loops.zero_grad_keeping_memory, ddp=BUCKET_VIEWS),
    "zero_grad_of_the_model": Case(loops.zero_grad_of_the_model),
    "zero_grad_after_step": Case(loops.zero_grad_after_step),
    "zero_grad_in_place_after_step": Case(loops.zero_grad_in_place_after_step, ddp=BUCKET_VIEWS, pipelined=False),
    "zero_grad_between_forward_and_backward": Case(loops.zero_grad_between_forward_and_backward),
    # Local gradients are added to what was reduced, so there is nothing left to pipeline.
    "never_zero_grad": Case(loops.never_zero_grad, pipelined=False),
    "never_zero_grad_bucket_view": Case(loops.never_zero_grad, ddp=BUCKET_VIEWS, pipelined=False),
    "accumulate_with_no_sync": Case(loops.accumulate_with_no_sync),
    "accumulate_with_no_sync_bucket_view": Case(loops.accumulate_with_no_sync, ddp=BUCKET_VIEWS),
    "accumulate_without_no_sync": Case(loops.accumulate_without_no_sync, pipelined=False),
    "accumulate_without_no_sync_bucket_view": Case(loops.accumulate_without_no_sync, ddp=BUCKET_VIEWS, pipelined=False),
    "scheduler_made_before_attach": Case(loops.scheduler_made_before_attach),
    "scheduler_made_after_attach": Case(loops.scheduler_made_after_attach),
    "count_step_hooks": Case(loops.count_step_hooks),
    "sometimes_no_step": Case(loops.sometimes_no_step),
    "two_steps_per_backward": Case(loops.two_steps_per_backward, pipelined=False),
    "backward_inside_closure": Case(loops.backward_inside_closure, pipelined=False),
    "state_moves_around_closures": Case(loops.state_moves_around_closures, pipelined=False),
    "several_forwards_per_step": Case(forward_loops.several_forwards_per_step),
    "evaluate_between_steps": Case(forward_loops.evaluate_between_steps),
    "evaluate_before_step": Case(forward_loops.evaluate_before_step),
    "inference_mode_between_steps": Case(forward_loops.inference_mode_between_steps),
    # Its graph holds a view of a weight when step() is called, so that weight's update is not deferred.
    "training_forward_without_backward": Case(forward_loops.training_forward_without_backward, pipelined=False),
    "one_layer_alone": Case(forward_loops.one_layer_alone),
    "state_dict_after_every_step": Case(forward_loops.state_dict_after_every_step),
    "module_state_dict_after_every_step": Case(forward_loops.module_state_dict_after_every_step),
    "submodule_state_dict": Case(forward_loops.submodule_state_dict_after_every_step),
    "synchronize_and_read": Case(forward_loops.synchronize_and_read),
    "read_in_synchronized": Case(forward_loops.read_in_synchronized),
    "average_weights": Case(forward_loops.average_weights),
    "copy_the_module": Case(forward_loops.copy_the_module),
    "restore_best_weights": Case(forward_loops.restore_best_weights),
    "restore_optimizer_state": Case(forward_loops.restore_optimizer_state),
    "two_models_in_turn": Case(forward_loops.two_models_in_turn),
    "two_models_at_once": Case(forward_loops.two_models_at_once),
    "forward_called_by_name": Case(forward_loops.forward_called_by_name),
    "gradients_logged_by_hooks": Case(forward_loops.gradients_logged_by_hooks),
    "parameters_written_by_hooks": Case(forward_loops.parameters_written_by_hooks),
}

# Loops that need a certain optimizer, or make one of their own.
LOOPS_WITH_THEIR_OPTIMIZER = {
    "one_cycle": Case(loops.one_cycle),
    "edit_hyperparameters_after_step": Case(loops.edit_hyperparameters_after_step),
    "param_groups": Case(optimizer=grouped),
    "param_groups_sgd": Case(optimizer=grouped_sgd),
    "param_groups_scheduled": Case(loops.scheduler_made_after_attach, optimizer=grouped),
    "two_optimizers": Case(loops.every_optimizer_steps, optimizer=two_optimizers),
    "two_optimizers_scheduled": Case(loops.scheduler_made_after_attach, optimizer=two_optimizers),
    "interleaved_optimizers": Case(loops.every_optimizer_steps, optimizer=interleaved_optimizers),
    "optimizers_take_turns": Case(loops.optimizers_take_turns, optimizer=interleaved_optimizers, pipelined=False),
    "partial_optimizer": Case(optimizer=partial_optimizer),
    "add_a_param_group": Case(loops.add_a_param_group, optimizer=partial_optimizer, pipelined=False),
    "two_models_two_optimizers_skipping": Case(
        loops.every_optimizer_steps,
        model=partial(SkippingNet, apart=True),
        optimizer=interleaved_optimizers,
        ddp={"find_unused_parameters": True},
    ),
}

# Plain DDP again after that, and so with sums in its own order: comparable up to two ranks.
DETACH = {
    "detach_halfway": Case(forward_loops.detach_halfway, pipelined=False),
    "detach_halfway_bucket_view": Case(forward_loops.detach_halfway, ddp=BUCKET_VIEWS, pipelined=False),
}


@pytest.mark.parametrize(
    "case",
    spread(
        LOOPS,
        quick=(
            "plain",
            "accumulate_with_no_sync",
            "never_zero_grad",
            "state_dict_after_every_step",
            "evaluate_between_steps",
        ),
    ),
)
def test_loop_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", spread(LOOPS_WITH_THEIR_OPTIMIZER, choose_optimizer=False))
def test_loop_with_its_own_optimizer_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", spread(DETACH, world_sizes=(1, 2)))
def test_a_detached_model_trains_on_as_plain_ddp(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)
