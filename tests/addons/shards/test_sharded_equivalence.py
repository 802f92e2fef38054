"""With `shard_optimizer=True`, training has the bits of plain DDP, also where the fuzzer does not draw it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch

import gradient_loops
import loops
import resume_loops
import wirings
from equivalence import ADAMW, SGD, STEPS, Case, check_case, optimizer
from models import MatrixNet, OddNet
from optimizers import MUON, OPTIMIZERS, interleaved_optimizers
from own_optimizers import LooksAtItsGroupFirst, OwnOptimizer

SHARDED = MappingProxyType({"shard_optimizer": True})
BUCKET_VIEWS = {"gradient_as_bucket_view": True}


def check(case: Case, on_ranks, **changes) -> None:
    case = replace(case, **changes)
    check_case(replace(case, dear={**case.dear, **SHARDED}), on_ranks)


@pytest.mark.parametrize(("name", "world_size"), [("muon", 2), ("adafactor", 1), ("adamw", 4)])
def test_optimizer_is_exact(on_ranks, name: str, world_size: int) -> None:
    model = {"muon": MatrixNet, "adafactor": partial(OddNet, empty_parameter=False)}.get(name, OddNet)
    made_by = MUON if name == "muon" else OPTIMIZERS[name]
    views = BUCKET_VIEWS if world_size % 2 else {}
    check(Case(model=model, optimizer=made_by, world_size=world_size, ddp=views), on_ranks, pipelined=world_size > 1)


def test_an_optimizer_may_look_at_its_groups_before_it_calls_its_closure(on_ranks) -> None:
    check(Case(optimizer=optimizer(LooksAtItsGroupFirst)), on_ranks, pipelined=False)
    check_case(Case(optimizer=optimizer(LooksAtItsGroupFirst), pipelined=False), on_ranks)


# Whether every update can go between the legs: not if something reads gradients, or there is none at times.
LOOPS = {
    "state_moves_around_closures": (loops.state_moves_around_closures, False),
    "add_a_param_group": (loops.add_a_param_group, False),
    "spoil_gradients_after_step": (gradient_loops.spoil_gradients_after_step, False),
    "resume": (partial(resume_loops.resume, after="step"), True),
    "resume_between_backward_and_step": (partial(resume_loops.resume, after="backward"), False),
}


@pytest.mark.parametrize(("name", "row"), [(name, index % 2) for index, name in enumerate(LOOPS)])
def test_loop_is_exact(on_ranks, name: str, row: int) -> None:
    loop, pipelined = LOOPS[name]
    made_by, views, world_size = [(ADAMW, BUCKET_VIEWS, 2), (SGD, {}, 3)][row]
    steps = resume_loops.STEPS if name.startswith("resume") else STEPS
    case = Case(loop, optimizer=made_by, world_size=world_size, steps=steps, ddp=views, pipelined=pipelined)
    check(case, on_ranks)


def test_reentrant_checkpoint_is_exact(on_ranks) -> None:
    check(Case(model=wirings.CheckpointNet, world_size=3, ddp=BUCKET_VIEWS), on_ranks)


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


class UnscalesByItself(OwnOptimizer):
    """Takes the scale from a GradScaler, and leaves `.grad` as it is."""

    _step_supports_amp_scaling = True
    in_place = False

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        factor = 1 / getattr(self, "grad_scale", torch.ones(()))
        if not getattr(self, "found_inf", 0):
            for p in parameters:
                p.sub_((p.grad.mul_(factor) if self.in_place else p.grad * factor) * group["lr"])


class UnscalesInPlace(UnscalesByItself):
    in_place = True


@pytest.mark.parametrize(
    "made_by",
    [optimizer(UnscalesByItself), optimizer(UnscalesInPlace), OPTIMIZERS["adamw_fused"]],
    ids=["by itself", "in place", "fused"],
)
@pytest.mark.parametrize("norms", ["exact", "sharded"])
def test_gradients_are_what_an_optimizer_leaves_that_unscales_them(on_ranks, made_by, norms: str) -> None:
    loop = partial(gradient_loops.scaler, own=norms == "sharded")
    check(Case(loop, optimizer=made_by, dear={"norms": norms}, pipelined=False), on_ranks)


@pytest.mark.parametrize("through", ["through_state_dicts", "through_get_state_dict", "through_distributed_checkpoint"])
def test_checkpoints(on_ranks, through: str) -> None:
    restart = getattr(resume_loops, through)
    check(Case(partial(resume_loops.resume, after="step", restart=restart), steps=resume_loops.STEPS), on_ranks)
