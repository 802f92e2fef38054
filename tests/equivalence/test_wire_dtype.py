"""Gradients in 16 bits on the wire: bit for bit DDP with a hook that casts, adds up in fp32 and in rank
order, and rounds once (`reference.wire_dtype_hook`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import gradient_loops
from ddp_crossover.comm.sums import CHUNK_NUMEL, add_in_rank_order, scale_into
from ddp_crossover.fusion import MB
from equivalence import SGD, Case, Run, check_case, plain_loop
from models import DeepNet, MixedDtypeNet, OddNet, OneDtypeNet
from optimizers import OPTIMIZERS

BF16, FP16 = torch.bfloat16, torch.float16
BUCKET_VIEWS = {"gradient_as_bucket_view": True}
# The largest element is the same in whatever order it is looked for, so clipping by it is exact.
WITHOUT_EMPTY = partial(OddNet, empty_parameter=False)


def clip_on_shards_and_read(run: Run) -> Iterator[Any]:
    """Our own clipping; now and then somebody reads the clipped gradients before the step, after it, or when the
    next forward has used them up.
    """
    parameters = list(run.model.parameters())
    for index, (x, y) in enumerate(run.batches()):
        loss = run.loss(run.model(x), y)
        used = [p.grad.clone() for p in parameters if p.grad is not None] if index % 4 == 0 else []
        run.optimizer.zero_grad()
        loss.backward()
        norm = run.clip_grad_norm_(gradient_loops.ACTIVE_NORM, float("inf"))
        before = [p.grad.clone() for p in parameters] if index % 4 == 1 else []
        run.optimizer.step()
        after = [p.grad.clone() for p in parameters] if index % 4 == 2 else []
        yield loss, norm, used, before, after


def norms_on_shards(run: Run) -> Iterator[Any]:
    """Norms of our own, with nothing to clip."""
    for loss in gradient_loops._backward(run):
        norm = run.clip_grad_norm_(gradient_loops.INACTIVE_NORM)
        run.optimizer.step()
        yield loss, norm


def overflow_on_the_wire(run: Run, own: bool) -> Iterator[Any]:
    """A loss scale that fp32 takes and fp16 does not, when all runs already: the steps are skipped."""
    scaler = run.grad_scaler(own, init_scale=1.0, growth_interval=1000)
    for index, (x, y) in enumerate(run.batches()):
        if index == run.case.steps // 2:
            scaler.update(2.0**24)
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        if index == run.case.steps // 2:
            assert scaler.get_scale() == 2.0**23, "nothing overflowed"
        yield loss, scaler.get_scale()


CASES = {
    "plain-1": Case(world_size=1),
    "plain-4": Case(world_size=4, optimizer=OPTIMIZERS["adamw_foreach"]),
    "fp16_parameters": Case(model=partial(MixedDtypeNet, FP16), optimizer=SGD),
    "fp64_parameters": Case(model=partial(MixedDtypeNet, torch.float64), optimizer=SGD, world_size=4),
    "own_clipping": Case(clip_on_shards_and_read, model=WITHOUT_EMPTY, world_size=3, pipelined=False),
    "own_clipping_fp64": Case(norms_on_shards, model=partial(OneDtypeNet, torch.float64), exact=False),
    "norms": Case(norms_on_shards, world_size=4, exact=False),
}
"""What the fuzzer does not draw with 16 bits on the wire."""


def _on_the_wire(case: Case, dtype: torch.dtype) -> Case:
    return replace(case, dear={**case.dear, "wire_dtype": dtype})


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_exactly_a_cast_a_sum_in_fp32_and_a_cast(on_ranks, name) -> None:
    check_case(_on_the_wire(CASES[name], BF16), on_ranks)


@pytest.mark.parametrize("name", ["plain-4", "own_clipping"])
def test_fp16_is_exactly_a_cast_a_sum_in_fp32_and_a_cast(on_ranks, name) -> None:
    check_case(_on_the_wire(CASES[name], FP16), on_ranks)


@pytest.mark.parametrize("own", [True, False], ids=["own", "stock"])
def test_an_overflow_on_the_wire_skips_the_step_everywhere(on_ranks, own) -> None:
    case = Case(partial(overflow_on_the_wire, own=own), pipelined=own)
    check_case(_on_the_wire(case, FP16), on_ranks)


def _plan() -> Any:
    run = Run(Case(model=DeepNet, dear={"wire_dtype": BF16}, steps=8), with_dear=True)
    list(plain_loop(run))
    plan = run.state.plan
    run.detach()
    return plan


def test_groups_have_the_size_asked_for_on_the_wire(on_ranks) -> None:
    (plan,) = on_ranks(_plan, 1)
    assert set(plan.arena_numel) == {"float32 as bfloat16 on cpu"}
    largest = max(group.numel for group in plan.groups)
    assert largest * 2 <= plan.fusion_mb * MB < largest * 4


def test_16_bit_terms_are_rounded_once_and_not_after_each_addition() -> None:
    own, others = torch.tensor([256.0], dtype=BF16), [torch.tensor([1.0], dtype=BF16)] * 2
    add_in_rank_order(own, 0, list(others), in_fp32=True)
    assert own.item() == 258.0  # 256 + 1 is 256 in bf16


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_longer_than_a_chunk(ranks, dtype) -> None:
    terms = [torch.randn(CHUNK_NUMEL + 3).to(dtype) for _ in range(ranks)]
    expected = terms[0].float()
    for term in terms[1:]:
        expected = expected + term.float()
    add_in_rank_order(terms[1], 1, [terms[0], *terms[2:]], in_fp32=True)
    assert torch.equal(terms[1], expected.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32], ids=str)
def test_a_gradient_longer_than_a_chunk(dtype) -> None:
    gradient = torch.randn(CHUNK_NUMEL + 3)
    scaled = torch.empty(gradient.numel(), dtype=dtype)
    scale_into(scaled, gradient, 1 / 3)
    assert torch.equal(scaled, (gradient * (1 / 3)).to(dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_one_addition_of_torch_is_an_fp32_sum_rounded_once(dtype) -> None:
    """What `add_in_rank_order` relies on for two ranks; every number of the dtype with some of them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for number in every[:: 2**9 - 1]:
        total = torch.add(every, number.expand_as(every).contiguous(), out=torch.empty_like(every))
        torch.testing.assert_close(total, (every.float() + number.float()).to(dtype), rtol=0, atol=0, equal_nan=True)
