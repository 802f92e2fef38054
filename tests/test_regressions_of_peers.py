"""Bugs of other gradient pipelines, each of which this one must not have."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import forward_loops
import loops
import models
import resume_loops
import wirings
from equivalence import ADAMW, SGD, Case, Run, check_case, optimizer, plain_loop
from optimizers import grouped_sgd


def test_several_forwards_per_step_update_once(on_ranks) -> None:
    """DeAR's code: k forwards per step apply the update k times."""
    check_case(Case(forward_loops.several_forwards_per_step, optimizer=SGD), on_ranks)


def test_evaluation_after_step_sees_the_updated_weights(on_ranks) -> None:
    """DeAR's code: eval under `no_grad` after `step()` sees stale weights."""
    check_case(Case(forward_loops.evaluate_between_steps, optimizer=SGD, strict=False), on_ranks)


def test_second_param_group_keeps_its_own_lr_and_momentum(on_ranks) -> None:
    """DeAR's code: the second param group's lr and momentum are wrong."""
    check_case(Case(optimizer=grouped_sgd), on_ranks)


def test_adamw_works(on_ranks) -> None:
    """DeAR's code: AdamW raises."""
    check_case(Case(optimizer=ADAMW), on_ranks)


def _bytes_sent_per_step(accumulation: int) -> float:
    case = Case(model=models.DeepNet, steps=10 * accumulation)
    run = Run(case, with_dear=True)
    for index, (x, y) in enumerate(run.batches()):
        if (index + 1) % accumulation:
            with run.model.no_sync():
                run.loss(run.model(x), y).backward()
        else:
            run.loss(run.model(x), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    run.synchronize()
    stats = run.state.stats()
    run.detach()
    assert stats.iterations == 10
    return stats.sent_bytes / stats.iterations


def test_accumulation_communicates_once_per_step(on_ranks) -> None:
    """DeAR's code: five accumulated micro-batches reduce-scatter five times instead of once."""
    assert on_ranks(_bytes_sent_per_step, 2, 5) == on_ranks(_bytes_sent_per_step, 2, 1)


class AlignedNet(nn.Module):
    """Every size divides by every world size up to 4."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(models.INPUTS, 24)
        self.head = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.lift(x)))[:, : models.OUTPUTS]


def _bytes_sent_by_one_aligned_step() -> int:
    run = Run(Case(model=AlignedNet, dear={"fusion_mb": 25}), with_dear=True)
    sent = []
    for x, y in run.batches():
        run.optimizer.zero_grad()
        run.loss(run.model(x), y).backward()
        run.optimizer.step()
        run.synchronize()
        sent.append(run.state.stats().sent_bytes)
    run.detach()
    return sent[-1] - sent[-2]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_padding_where_sizes_divide_by_the_world_size(on_ranks, world_size) -> None:
    """DeAR's code: a full extra `world_size` of padding when already aligned."""
    elements = sum(p.numel() for p in AlignedNet().parameters())
    optimum = 2 * (world_size - 1) * elements * 4 // world_size
    assert on_ranks(_bytes_sent_by_one_aligned_step, world_size) == [optimum] * world_size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_is_communicated(on_ranks, dtype) -> None:
    """DeAR's code: dtypes other than fp32 are not communicated."""
    check_case(Case(model=partial(models.MixedDtypeNet, dtype), optimizer=SGD), on_ranks)


def _parameters_after(with_dear: bool, end: str) -> list[torch.Tensor]:
    run = Run(Case(optimizer=SGD, strict=False), with_dear)
    for _ in plain_loop(run):
        pass
    if run.state is not None:
        getattr(run.state, end)()
    return [p.detach().clone() for p in run.model.parameters()]


@pytest.mark.parametrize("end", ["synchronize", "detach"])
def test_the_last_update_is_not_lost(on_ranks, end) -> None:
    """DeAR's code: the update that is pending when training ends is lost."""
    expected, seen = (on_ranks(_parameters_after, 2, with_dear, end) for with_dear in (False, True))
    for one, other in zip(expected[0], seen[0], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("model", [wirings.ReversedNet, wirings.ShuffledNet])
def test_order_of_use_may_differ_from_order_of_buckets(on_ranks, model) -> None:
    """Megatron-LM #950: bucket order differs from forward order, forward uses stale weights."""
    check_case(Case(model=model), on_ranks)


def test_parameters_outside_any_submodule_are_waited_for(on_ranks) -> None:
    """Megatron-LM #728: a parameter outside of any module, and training hangs."""
    check_case(Case(model=wirings.RootParameterNet), on_ranks)


def test_reused_buffers_hold_nothing_of_the_step_before(on_ranks) -> None:
    """Megatron-LM #4609: a reused gradient buffer is not zeroed, and unused parameters get old
    gradients.
    """
    check_case(
        Case(model=partial(wirings.SkippingNet, apart=True), ddp={"find_unused_parameters": True}),
        on_ranks,
    )


def test_two_models_keep_to_their_own_parameters(on_ranks) -> None:
    """NeMo-RL #561: one model's all-gathers land in another model's parameters."""
    check_case(Case(forward_loops.two_models_at_once), on_ranks)


def test_a_resumed_run_has_no_spike(on_ranks) -> None:
    """NeMo-RL #949: the loss jumps after resuming."""
    check_case(Case(resume_loops.never_interrupted, steps=resume_loops.STEPS), on_ranks)


def test_the_first_steps_update(on_ranks) -> None:
    """PyTorch's `hook_with_zero_step`: no update in the first two steps."""
    check_case(Case(forward_loops.synchronize_and_read, optimizer=SGD, steps=3, pipelined=False), on_ranks)


def test_an_unused_parameter_does_not_decay(on_ranks) -> None:
    """Hooks that give globally unused parameters a gradient of zeros make Adam decay them."""
    decaying = optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
    check_case(
        Case(
            loops.zero_grad_after_step,
            model=wirings.SkippingNet,
            optimizer=decaying,
            ddp={"find_unused_parameters": True},
        ),
        on_ranks,
    )
