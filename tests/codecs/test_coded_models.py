"""Codes with models, optimizers and settings that are odd, beside one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddp_crossover as dx
from coded_runs import (
    ADAM,
    MOMENTUM_SGD,
    SGD,
    Coded,
    CodedNet,
    Training,
    assert_same,
    compare_with_one_process,
    everywhere,
    loss_of,
)
from ddp_crossover.collectives.agreement import DisagreementError
from harness import run_ranks
from models import INPUTS, OUTPUTS, ChannelsLastNet, OddNet
from optimizers import interleaved_optimizers

OnRanks = Callable[..., list[Any]]
INT8: dict[str, Any] = {"wire_dtype": torch.int8}
SPARSE_INT8: dict[str, Any] = {"compress": dx.TopK(0.05)} | INT8


class InDtype(nn.Module):
    """In one dtype, but for its input and output."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.net = CodedNet(60).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.dtype))


class Tied(nn.Module):
    """The first and the last layer share a weight, and a layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(INPUTS, 40)
        self.middle = nn.Linear(40, 40, bias=False)
        self.again = nn.Linear(40, 40, bias=False)
        self.again.weight = self.middle.weight
        self.head = nn.Linear(40, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.middle(self.middle(self.lift(x)))))))


class Frozen(CodedNet):
    """Without gradients in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.requires_grad_(False)


class Recomputed(CodedNet):
    """Its middle is computed again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x))) * self.gain
        return self.last(torch.tanh(checkpoint(self.middle, hidden, use_reentrant=self.use_reentrant)))


class WithoutMatrices(nn.Module):
    """Nothing to code."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(INPUTS))
        self.bias = nn.Parameter(torch.zeros(OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain)[:, :OUTPUTS] + self.bias


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bf16": partial(InDtype, torch.bfloat16),
    "fp16": partial(InDtype, torch.float16),
    "fp64": partial(InDtype, torch.float64),
    "channels last": ChannelsLastNet,
    "tied": Tied,
    "frozen": Frozen,
    "checkpoint": partial(Recomputed, False),
    "reentrant checkpoint": partial(Recomputed, True),
    "empty and odd": OddNet,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(on_ranks: OnRanks, name: str) -> None:
    on_ranks(compare_with_one_process, 2, Coded(SPARSE_INT8, SGD, MODELS[name]))


def test_gradients_in_buckets(on_ranks: OnRanks) -> None:
    case = Coded(INT8, ADAM, ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}, looks=False)
    on_ranks(compare_with_one_process, 2, case)


def _by_hand(
    options: dict[str, Any], loop: Callable[[Training, int], list[int]], ddp: dict[str, Any], model: Any, steps: int
) -> None:
    """A loop of real ranks; it returns the batches whose gradients were added up in the step."""
    world_size = dist.get_world_size()
    run = Training(Coded(options, SGD, model, ddp=ddp))
    reference = run.reference()
    for step in range(steps):
        batches = loop(run, step)
        losses = [partial(_loss_of_several, batches, rank) for rank in range(world_size)]
        reference.step(losses, run.state.plan)
        assert_same(run.parameters(), {n: p.detach() for n, p in reference.model.named_parameters()}, f"step {step}")
    for rank, left_out in enumerate(everywhere(run.left_out())):
        assert_same(left_out["residual"], reference.ranks.residual[rank], f"residual of rank {rank}")
    run.state.detach()


def _loss_of_several(batches: list[int], rank: int, model: nn.Module) -> Tensor:
    """Accumulates in ``.grad``, but for the last one."""
    for batch in batches[:-1]:
        loss_of(batch, rank, model).backward()
    return loss_of(batches[-1], rank, model)


def _accumulates(run: Training, step: int) -> list[int]:
    rank = dist.get_rank()
    run.optimizer.zero_grad()
    with run.model.no_sync():
        loss_of(3 * step, rank, run.model).backward()
        loss_of(3 * step + 1, rank, run.model).backward()
    loss_of(3 * step + 2, rank, run.model).backward()
    run.optimizer.step()
    return [3 * step, 3 * step + 1, 3 * step + 2]


@pytest.mark.parametrize("views", [False, True])
def test_only_the_last_backward_of_an_accumulation_is_coded(on_ranks: OnRanks, views: bool) -> None:
    on_ranks(_by_hand, 2, SPARSE_INT8, _accumulates, {"gradient_as_bucket_view": views}, CodedNet, 9)


class SometimesUnused(nn.Module):
    """No rank uses the side in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = CodedNet(60)
        self.side = nn.Linear(INPUTS, OUTPUTS)
        self.is_used = True

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + (self.side(x) if self.is_used else 0.0)


def _unused(options: dict[str, Any], views: bool, fusion_mb: float) -> None:
    rank = dist.get_rank()
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    run = Training(Coded(options | {"fusion_mb": fusion_mb}, SGD, SometimesUnused, ddp=ddp))
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


@pytest.mark.parametrize("fusion_mb", [1e-4, 8e-3, 1.0])
@pytest.mark.parametrize("views", [False, True])
def test_parameters_that_no_rank_uses_keep_what_was_left_out(on_ranks: OnRanks, views: bool, fusion_mb: float) -> None:
    on_ranks(_unused, 2, SPARSE_INT8, views, fusion_mb)


def _several(with_codes: bool) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = DistributedDataParallel(CodedNet())
    optimizers = interleaved_optimizers(model.module)
    state = dx.attach(model, optimizers, fusion_mb=0.01, compress=dx.TopK(1.0)) if with_codes else None
    if state is None:
        state = dx.attach(model, optimizers, fusion_mb=0.01)
    for step in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(step, dist.get_rank(), model).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert state.plan is not None and state.plan.is_coded is with_codes
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_density_1_is_the_dense_pipeline(on_ranks: OnRanks, world_size: int) -> None:
    dense, coded = on_ranks(_several, world_size, False), on_ranks(_several, world_size, True)
    for left, right in zip(dense, coded, strict=True):
        assert_same(left, right, "density 1")


def _one_dimensional(options: dict[str, Any]) -> None:
    """At the same parameters, gradients of one-dimensional ones are those of plain DDP."""
    rank = dist.get_rank()
    run = Training(Coded(options))
    for step in range(6):
        run.step(step)
    run.state.synchronize()
    torch.manual_seed(1)
    plain = DistributedDataParallel(CodedNet())
    plain.module.load_state_dict(run.model.module.state_dict())
    run.backward(6)
    loss_of(6, rank, plain).backward()
    for (name, ours), theirs in zip(run.model.module.named_parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad) == (ours.dim() < 2), name


@pytest.mark.parametrize("options", [INT8, SPARSE_INT8], ids=["int8", "sparse"])
def test_one_dimensional_parameters_are_not_coded(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    on_ranks(_one_dimensional, 2, options)


def _telescopes(options: dict[str, Any], exact: bool) -> None:
    """What was decoded plus what is left out is the sum of all true means."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = Training(Coded(options, partial(_still), steps=0))
    generator = torch.Generator().manual_seed(rank)
    names = [name for name, p in run.model.module.named_parameters() if p.dim() > 1]
    true = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in run.model.module.named_parameters()}
    decoded = {name: torch.zeros_like(one) for name, one in true.items()}
    for _ in range(12):
        run.optimizer.zero_grad()
        gradients = {
            name: torch.randint(-64, 65, p.shape, generator=generator).float() * 2.0**-10
            if exact
            else torch.randn(p.shape, generator=generator).pow(3)
            for name, p in run.model.module.named_parameters()
        }
        sum((p * gradients[name]).sum() for name, p in _through(run.model)).backward()
        for name, p in run.model.module.named_parameters():
            decoded[name] += p.grad
        for one in everywhere(gradients):
            for name in true:
                true[name] += one[name].double() / world_size
    left = everywhere(run.left_out()["residual"])
    for name in names:
        total = decoded[name].flatten() + sum(one[name].double() for one in left)
        error = (total - true[name].flatten()).abs().max()
        assert any(one[name].any() for one in left)
        assert error == 0 if exact else error < 1e-5 * true[name].abs().max(), (name, error)


def _still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def _through(model: DistributedDataParallel) -> Iterator[tuple[str, Tensor]]:
    model(torch.zeros(1, INPUTS))
    yield from model.module.named_parameters()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("options", [{"compress": dx.TopK(0.05)}, INT8, SPARSE_INT8], ids=["top-k", "int8", "both"])
def test_nothing_is_lost(on_ranks: OnRanks, options: dict[str, Any], exact: bool) -> None:
    on_ranks(_telescopes, 2, options, exact)


def _clips(options: dict[str, Any], norms: str, how: str) -> None:
    rank = dist.get_rank()
    run = Training(Coded(options | {"norms": norms}, MOMENTUM_SGD))
    reference = run.reference()
    clip = {"stock": nn.utils.clip_grad_norm_, "own": lambda _, limit: run.state.clip_grad_norm_(limit)}[how]
    step = 0
    original = reference.optimizer.step

    def clipped() -> None:
        nonlocal expected
        expected = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.3)
        original()

    expected = torch.tensor(0.0)
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
    on_ranks(_clips, 2, INT8, norms, how)


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


@pytest.mark.parametrize("options", [INT8, SPARSE_INT8, INT8 | {"groups": "node"}], ids=["int8", "both", "node"])
def test_one_rank_is_plain_ddp(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    on_ranks(_one_rank, 1, options)


def _two_models_and_detach() -> None:
    rank = dist.get_rank()
    runs = [Training(Coded(INT8, ADAM)), Training(Coded(SPARSE_INT8, SGD))]
    alone = [Training(Coded(INT8, ADAM)), Training(Coded(SPARSE_INT8, SGD))]
    for step in range(7):
        for run in runs:
            run.optimizer.zero_grad()
        sum(loss_of(step, rank, run.model) for run in runs).backward()
        for run, one in zip(runs, alone, strict=True):
            run.optimizer.step()
            one.step(step)
    for run, one in zip(runs, alone, strict=True):
        assert_same(run.parameters(), one.parameters(), "two models")
        assert_same(run.left_out()["residual"], one.left_out()["residual"], "residuals")
    for run in runs:
        run.state.detach()
    torch.manual_seed(20)
    plain = DistributedDataParallel(CodedNet())
    plain.module.load_state_dict(runs[1].model.module.state_dict())
    optimizer = SGD(plain)
    for step in range(7, 10):
        runs[1].step(step)
        optimizer.zero_grad()
        loss_of(step, rank, plain).backward()
        optimizer.step()
    expected = {name: p.detach() for name, p in plain.module.named_parameters()}
    assert_same(runs[1].parameters(), expected, "after detach")


def test_two_models_at_once_then_detach(on_ranks: OnRanks) -> None:
    on_ranks(_two_models_and_detach, 2)


def _bytes(options: dict[str, Any]) -> tuple[int, Any]:
    run = Training(Coded(options, model=partial(CodedNet, 400), steps=0))
    for step in range(5):
        run.step(step)
    assert run.state.plan is not None
    run.state.synchronize()
    before = run.state.stats().sent_bytes
    for step in range(5, 9):
        run.step(step)
    run.state.synchronize()
    return run.state.stats().sent_bytes - before, run.state.plan


@pytest.mark.parametrize("world_size", [2, 4])
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
def test_bytes_that_are_sent(
    on_ranks: OnRanks, options: dict[str, Any], scatter: float, gather: float, world_size: int
) -> None:
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
        ({"groups": "node", "shard_optimizer": True}, "leave out groups="),
        ({"groups": "node", "schedule": "allreduce"}, "leave out one of them"),
        ({"groups": "rack"}, "groups must be 'node' or None"),
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


def _uneven_nodes() -> str:
    os.environ["GROUP_RANK"] = str(min(dist.get_rank(), 1))
    model = DistributedDataParallel(CodedNet())
    try:
        dx.attach(model, SGD(model), wire_dtype=torch.int8, groups="node")
    except ValueError as error:
        return str(error)
    return ""


def test_nodes_with_different_numbers_of_ranks() -> None:
    for message in run_ranks(_uneven_nodes, 3):
        assert "start the same number on each, or leave out groups=" in message
