"""With `shard_optimizer=True`, training has the bits of plain DDP: every optimizer, loop and model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType

import pytest
import torch

import forward_loops
import gradient_loops
import loops
import resume_loops
import wirings
from equivalence import ADAMW, SGD, STEPS, Case, check_case
from models import BatchNormNet, ChannelsLastNet, DeepNet, FrozenNet, MatrixNet, MixedDtypeNet, OddNet
from optimizers import MUON, OPTIMIZERS, grouped, interleaved_optimizers, partial_optimizer, two_optimizers
from random_loops import random_loop

SHARDED = MappingProxyType({"shard_optimizer": True})
BUCKET_VIEWS = {"gradient_as_bucket_view": True}


def check(case: Case, on_ranks, **changes) -> None:
    case = replace(case, **changes)
    check_case(replace(case, dear={**case.dear, **SHARDED}), on_ranks)


# Every other one on 2 ranks, which is plain DDP itself; the others on another number.
@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, (2, 1, 2, 3, 2, 4)[index % 6]) for index, name in enumerate([*OPTIMIZERS, "muon"])],
)
def test_optimizer_is_exact(on_ranks, name: str, world_size: int) -> None:
    model = {"muon": MatrixNet, "adafactor": partial(OddNet, empty_parameter=False)}.get(name, OddNet)
    optimizer = MUON if name == "muon" else OPTIMIZERS[name]
    views = BUCKET_VIEWS if world_size % 2 else {}
    check(Case(model=model, optimizer=optimizer, world_size=world_size, ddp=views), on_ranks, pipelined=world_size > 1)


# Whether every update can go between the legs: not if something reads gradients, or there is none at times.
LOOPS = {
    "zero_grad_keeping_memory": (loops.zero_grad_keeping_memory, True),
    "zero_grad_in_place_after_step": (loops.zero_grad_in_place_after_step, False),
    "zero_grad_between_forward_and_backward": (loops.zero_grad_between_forward_and_backward, True),
    "never_zero_grad": (loops.never_zero_grad, False),
    "accumulate_with_no_sync": (loops.accumulate_with_no_sync, True),
    "accumulate_without_no_sync": (loops.accumulate_without_no_sync, False),
    "scheduler": (loops.scheduler_made_after_attach, True),
    "edit_hyperparameters_after_step": (loops.edit_hyperparameters_after_step, True),
    "closure": (loops.backward_inside_closure, True),
    "state_moves_around_closures": (loops.state_moves_around_closures, False),
    "sometimes_no_step": (loops.sometimes_no_step, True),
    "two_steps_per_backward": (loops.two_steps_per_backward, False),
    "add_a_param_group": (loops.add_a_param_group, False),
    "clip_norm": (gradient_loops.clip_norm, False),
    "clip_value": (gradient_loops.clip_value, False),
    "own_clipping": (gradient_loops.clip_norm_on_shards_inactive, True),
    "stock_scaler": (gradient_loops.scaler, False),
    "own_scaler": (partial(gradient_loops.scaler, own=True), True),
    "rank_0_logs_a_gradient": (gradient_loops.log_one_gradient_sometimes, False),
    "log_gradients_after_step": (gradient_loops.log_gradients_after_step, False),
    "replace_gradients": (gradient_loops.replace_gradients, False),
    "drop_a_gradient": (gradient_loops.drop_a_gradient, False),
    "spoil_gradients_after_step": (gradient_loops.spoil_gradients_after_step, False),
    "evaluate_between_steps": (forward_loops.evaluate_between_steps, True),
    "resume": (partial(resume_loops.resume, after="step"), True),
    "resume_between_backward_and_step": (partial(resume_loops.resume, after="backward"), False),
}


@pytest.mark.parametrize(("name", "row"), [(name, index % 2) for index, name in enumerate(LOOPS)])
def test_loop_is_exact(on_ranks, name: str, row: int) -> None:
    loop, pipelined = LOOPS[name]
    optimizer, views, world_size = [(ADAMW, BUCKET_VIEWS, 2), (SGD, {}, 3)][row]
    steps = resume_loops.STEPS if name.startswith("resume") else STEPS
    case = Case(loop, optimizer=optimizer, world_size=world_size, steps=steps, ddp=views, pipelined=pipelined)
    check(case, on_ranks)


def test_detach_gives_the_optimizer_its_state(on_ranks) -> None:
    check(Case(forward_loops.detach_halfway, pipelined=False), on_ranks)


MODELS = {
    "frozen": FrozenNet,
    "channels_last": ChannelsLastNet,
    "batch_norm": BatchNormNet,
    "deep": DeepNet,
    "tied": wirings.TiedNet,
    "attention": wirings.AttentionNet,
    "checkpointed": partial(wirings.CheckpointNet, use_reentrant=True),
    "weight_norm": wirings.WeightNormNet,
    "twice": wirings.TwiceNet,
}


@pytest.mark.parametrize("name", MODELS)
def test_model_is_exact(on_ranks, name: str) -> None:
    check(Case(model=MODELS[name], world_size=2 + len(name) % 2, ddp=BUCKET_VIEWS), on_ranks)


def test_unused_parameters_are_left_alone(on_ranks) -> None:
    check(Case(model=wirings.SkippingNet, ddp={"find_unused_parameters": True}), on_ranks)


def test_mixed_dtypes(on_ranks) -> None:
    check(Case(model=partial(MixedDtypeNet, torch.bfloat16), world_size=3), on_ranks)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizers", [grouped, two_optimizers, interleaved_optimizers, partial_optimizer])
def test_param_groups_and_several_optimizers(on_ranks, optimizers, world_size: int) -> None:
    case = Case(loops.every_optimizer_steps, model=DeepNet, optimizer=optimizers, world_size=world_size)
    check(case, on_ranks, pipelined=False)


def test_optimizers_that_take_turns(on_ranks) -> None:
    check(Case(loops.optimizers_take_turns, optimizer=interleaved_optimizers, pipelined=False), on_ranks)


@pytest.mark.parametrize("schedule", ["auto", "dear"])
@pytest.mark.parametrize("fusion_mb", [1e-5, 1.0])
def test_groups_of_one_element_and_one_group(on_ranks, schedule: str, fusion_mb: float) -> None:
    # Zero-size shards, a parameter in many groups, and all parameters in one.
    check(Case(world_size=4, dear={"schedule": schedule, "fusion_mb": fusion_mb}), on_ranks)


@pytest.mark.parametrize("optimizer", [ADAMW, OPTIMIZERS["adamw_fused"]], ids=["adamw", "adamw_fused"])
@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16])
def test_16_bit_wire(on_ranks, wire_dtype: torch.dtype, optimizer) -> None:
    check(Case(world_size=3, optimizer=optimizer, dear={"wire_dtype": wire_dtype}), on_ranks)


@pytest.mark.parametrize("loop", [loops.sometimes_no_step, gradient_loops.clip_norm, loops.never_zero_grad])
def test_16_bit_wire_where_gradients_are_read(on_ranks, loop) -> None:
    check(Case(loop, dear={"wire_dtype": torch.bfloat16}, pipelined=False), on_ranks)


@pytest.mark.parametrize("seed", range(4))
def test_random_loops_are_exact(on_ranks, seed: int) -> None:
    loop = partial(random_loop, seed=seed)
    ddp = BUCKET_VIEWS if seed % 2 else {}
    check(Case(loop, model=DeepNet, world_size=2 + seed % 2, steps=14, ddp=ddp, pipelined=False), on_ranks)


@pytest.mark.parametrize("through", ["through_state_dicts", "through_get_state_dict", "through_distributed_checkpoint"])
def test_checkpoints(on_ranks, through: str) -> None:
    restart = getattr(resume_loops, through)
    check(Case(partial(resume_loops.resume, after="step", restart=restart), steps=resume_loops.STEPS), on_ranks)
