"""Codes where gradients are not those of a tutorial: accumulated, unused, clipped, of one rank; bytes, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from coded_runs import (
    ADAM,
    MOMENTUM_SGD,
    SGD,
    Coded,
    CodedNet,
    Training,
    assert_same,
    everywhere,
    loss_of,
)
from ddp_crossover.comm.agreement import DisagreementError
from models import INPUTS, OUTPUTS
from optimizers import interleaved_optimizers

OnRanks = Callable[..., list[Any]]
INT8: dict[str, Any] = {"wire_dtype": torch.int8}
SPARSE_INT8: dict[str, Any] = {"compress": dx.TopK(0.05)} | INT8


def _loss_of_several(batches: list[int], rank: int, model: nn.Module) -> Tensor:
    """Accumulates in ``.grad``, but for the last one."""
    for batch in batches[:-1]:
        loss_of(batch, rank, model).backward()
    return loss_of(batches[-1], rank, model)


def _accumulates(views: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = Training(Coded(SPARSE_INT8, ddp={"gradient_as_bucket_view": views}))
    reference = run.reference()
    for step in range(9):
        batches = [3 * step, 3 * step + 1, 3 * step + 2]
        run.optimizer.zero_grad()
        with run.model.no_sync():
            for batch in batches[:-1]:
                loss_of(batch, rank, run.model).backward()
        loss_of(batches[-1], rank, run.model).backward()
        run.optimizer.step()
        reference.step([partial(_loss_of_several, batches, one) for one in range(world_size)], run.state.plan)
        assert_same(run.parameters(), reference.parameters(), f"step {step}")
    for one, left_out in enumerate(everywhere(run.left_out())):
        assert_same(left_out["residual"], reference.ranks.residual[one], f"residual of rank {one}")
    run.state.detach()


@pytest.mark.parametrize("views", [False, True])
def test_only_the_last_backward_of_an_accumulation_is_coded(on_ranks: OnRanks, views: bool) -> None:
    on_ranks(_accumulates, 2, views)


class SometimesUnused(nn.Module):
    """No rank uses the side in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = CodedNet(60)
        self.side = nn.Linear(INPUTS, OUTPUTS)
        self.is_used = True

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + (self.side(x) if self.is_used else 0.0)


def _unused(views: bool, fusion_mb: float) -> None:
    rank = dist.get_rank()
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    run = Training(Coded(SPARSE_INT8 | {"fusion_mb": fusion_mb}, SGD, SometimesUnused, ddp=ddp))
    torch.manual_seed(20)
    plain = DistributedDataParallel(SometimesUnused(), **ddp)
    for step in range(14):
        used = run.model.module.is_used = plain.module.is_used = step % 3 != 1
        side, rest = "side.weight", "net.middle.weight"
        before = {name: one.clone() for name, one in run.left_out()["residual"].items()}
        run.optimizer.zero_grad()
        plain.zero_grad()
        loss_of(step, rank, run.model).backward()
        loss_of(step, rank, plain).backward()
        ours, theirs = run.model.module.side.weight.grad, plain.module.side.weight.grad
        assert (ours is None) == (theirs is None), step
        if not used and theirs is not None:
            assert not ours.any()  # as without us, where DDP leaves zeros
        run.optimizer.step()
        after = run.left_out()["residual"]
        if before and run.state.plan is not None:
            assert not torch.equal(after[rest], before[rest])
            assert torch.equal(after[side], before[side]) != used, step
        everyones = everywhere(run.parameters())
        assert_same(everyones[0], everyones[1], f"step {step}")
    assert before[side].any()


@pytest.mark.parametrize(("views", "fusion_mb"), [(False, 1e-4), (True, 8e-3), (False, 1.0)])
def test_parameters_that_no_rank_uses_keep_what_was_left_out(on_ranks: OnRanks, views: bool, fusion_mb: float) -> None:
    on_ranks(_unused, 2, views, fusion_mb)


def _with_several_optimizers(options: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = DistributedDataParallel(CodedNet())
    optimizers = interleaved_optimizers(model.module)
    state = dx.attach(model, optimizers, fusion_mb=0.01, **options)
    for step in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(step, dist.get_rank(), model).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert state.plan is not None and state.plan.is_coded is bool(options)
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def test_density_1_is_the_dense_pipeline(on_ranks: OnRanks) -> None:
    dense, coded = (on_ranks(_with_several_optimizers, 3, wire) for wire in ({}, {"compress": dx.TopK(1.0)}))
    for left, right in zip(dense, coded, strict=True):
        assert_same(left, right, "density 1")


def _clips(norms: str, how: str) -> None:
    rank = dist.get_rank()
    run = Training(Coded(INT8 | {"norms": norms}, MOMENTUM_SGD))
    reference = run.reference()
    clip = {"stock": nn.utils.clip_grad_norm_, "own": lambda _, limit: run.state.clip_grad_norm_(limit)}[how]
    original = reference.optimizer.step
    expected = torch.tensor(0.0)

    def clipped() -> None:
        nonlocal expected
        expected = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.3)
        original()

    reference.optimizer.step = clipped
    for step in range(9):
        run.backward(step)
        norm = clip(run.model.parameters(), 0.3)
        run.optimizer.step()
        reference.step([partial(loss_of, step, one) for one in range(2)], run.state.plan)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0, msg=f"step {step}: {norm}, not {expected}")
        assert norm > 0.3
        for (name, ours), theirs in zip(run.parameters().items(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-6, msg=f"{name} in step {step}")
        everyones = everywhere(run.parameters())
        assert_same(everyones[rank], everyones[1 - rank], "ranks")


@pytest.mark.parametrize(("norms", "how"), [("exact", "stock"), ("sharded", "stock"), ("sharded", "own")])
def test_clipping_acts_on_the_decoded_mean(on_ranks: OnRanks, norms: str, how: str) -> None:
    on_ranks(_clips, 2, norms, how)


def _one_rank(options: dict[str, Any]) -> None:
    run = Training(Coded(options, ADAM))
    torch.manual_seed(20)
    plain = DistributedDataParallel(CodedNet())
    optimizer = ADAM(plain)
    for step in range(8):
        run.step(step)
        optimizer.zero_grad()
        loss_of(step, 0, plain).backward()
        optimizer.step()
    assert_same(run.parameters(), {n: p.detach() for n, p in plain.module.named_parameters()}, "one rank")
    state = run.state.state_dict()
    assert state == {"rank": 0, "world_size": 1}
    run.state.load_state_dict(state)


@pytest.mark.parametrize("options", [SPARSE_INT8, INT8 | {"groups": "node"}], ids=["both", "node"])
def test_one_rank_is_plain_ddp(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    on_ranks(_one_rank, 1, options)


def _bytes(options: dict[str, Any]) -> tuple[int, Any]:
    run = Training(Coded(options, model=partial(CodedNet, 400)))
    for step in range(5):
        run.step(step)
    assert run.state.plan is not None
    run.state.synchronize()
    before = run.state.stats().sent_bytes
    for step in range(5, 9):
        run.step(step)
    run.state.synchronize()
    return run.state.stats().sent_bytes - before, run.state.plan


@pytest.mark.parametrize(
    ("options", "scatter", "gather"),
    [
        (INT8, 66 / 64, 66 / 64),
        ({"compress": dx.TopK(0.01, "exact")}, 0.08, 4),
        ({"compress": dx.TopK(0.02, "chunked")} | INT8, 0.12, 66 / 64),
        ({"compress": dx.TopK(0.02, "exact"), "wire_dtype": torch.bfloat16}, 0.16, 2),
    ],
    ids=["int8", "exact", "chunked and int8", "exact and bf16"],
)
def test_bytes_that_are_sent(on_ranks: OnRanks, options: dict[str, Any], scatter: float, gather: float) -> None:
    world_size = 4
    for sent, plan in on_ranks(_bytes, world_size, options | {"fusion_mb": 0.1}):
        coded = sum(spec.numel for spec in plan.gradients if spec.is_coded)
        rest = sum(spec.numel for spec in plan.gradients if not spec.is_coded)
        as_is = 2 if options.get("wire_dtype") is torch.bfloat16 else 4
        each = coded * (scatter + gather) + rest * 2 * as_is
        assert sent / 4 == pytest.approx(each * (world_size - 1) / world_size, rel=0.02)


def _refusals() -> None:
    def attach(optimizer: Any = torch.optim.SGD, **options: Any) -> Any:
        model = DistributedDataParallel(CodedNet())
        return dx.attach(model, optimizer(model.parameters(), lr=0.1), **options)

    for options, message in (
        ({"wire_dtype": torch.int8, "schedule": "allreduce"}, "leave out one of them"),
        ({"compress": dx.TopK(), "schedule": "allreduce"}, "leave out one of them"),
        ({"wire_dtype": torch.int8, "shard_optimizer": True}, "leave out one of them"),
        ({"compress": dx.TopK(), "shard_optimizer": True}, "leave out one of them"),
        ({"groups": "node", "shard_optimizer": True}, "shares parameters among all ranks: leave out groups="),
        ({"groups": "node", "schedule": "allreduce"}, "leave out one of them"),
        ({"groups": "rack"}, "groups must be 'node' or None, got 'rack'"),
        ({"compress": 0.01}, "compress must be a dx.TopK"),
        ({"wire_dtype": torch.int16}, "wire_dtype must be"),
    ):
        with pytest.raises(ValueError, match=message):
            attach(**options)
    with pytest.raises(DisagreementError, match=r"options\.compress\.density is 0\.01 on rank 0"):
        attach(compress=dx.TopK(0.01 + dist.get_rank() / 100))


def test_refusals(on_ranks: OnRanks) -> None:
    on_ranks(_refusals, 2)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0}, "density must be above 0"),
        ({"density": 1.1}, "density must be above 0"),
        ({"density": float("nan")}, "density must be above 0"),
        ({"selector": "best"}, "selector must be one of auto, exact, chunked"),
        ({"warmup": [(0, 0.5)]}, "1 step or more"),
        ({"warmup": [(5, 2.0)]}, "density must be above 0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dx.TopK(**options)


@pytest.mark.quick
def test_densities_of_a_warmup() -> None:
    options = dx.TopK(0.01, warmup=[(2, 0.5), (3, 0.1)])
    assert [options.density_at(step) for step in range(7)] == [0.5, 0.5, 0.1, 0.1, 0.1, 0.01, 0.01]
