"""Relaxed synchronization on real ranks: what must hold exactly, whatever else it changes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.addons.relaxed import DiLoCo, LocalSGD, RelaxedState
from node_groups import TWO_BY_TWO, TWO_NODES, Layout, on_nodes
from relaxed_reference import adam, flat, net, samples, sgd, step_of, train_in_one_process

STEPS = 13


class Rank:
    """One rank of a relaxed training."""

    def __init__(self, policy: LocalSGD, optimizer: Any = sgd, dtype: torch.dtype = torch.float64, **dear: Any) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.ddp = DistributedDataParallel(net(dtype))
        self.optimizer = optimizer(self.ddp.parameters())
        self.state: RelaxedState = dx.attach(self.ddp, self.optimizer, sync=policy, **dear)
        self.done = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            step_of(self.ddp, self.optimizer, self.done, self.rank)
            self.done += 1

    def parameters(self) -> Tensor:
        """As the next forward sees them."""
        self.state._before_forward()
        return flat(self.ddp.module)

    def of_ranks(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor)
        return gathered


@contextlib.contextmanager
def relaxed(*args: Any, **options: Any) -> Any:
    one = Rank(*args, **options)
    yield one
    one.state.detach()


def _train(policy: LocalSGD, optimizer: Any, layout: Layout | None = None) -> tuple[Tensor, int]:
    with on_nodes(layout) if layout else contextlib.nullcontext(), relaxed(policy, optimizer) as one:
        one.train(STEPS)
        return one.parameters(), one.state.stats().means


def _check(on_ranks: Any, world_size: int, policy: LocalSGD, optimizer: Any, layout: Layout | None = None) -> None:
    due_after: list[int] = []
    expected = train_in_one_process(policy, world_size, STEPS, optimizer, layout, due_after)
    means = sum(1 for done in due_after if done + policy.delay <= STEPS or done != due_after[-1])
    for ours, simple in zip(on_ranks(_train, world_size, policy, optimizer, layout), expected, strict=True):
        torch.testing.assert_close(ours[0], simple, rtol=1e-12, atol=1e-12)
        assert ours[1] == means


@pytest.mark.parametrize(
    ("world_size", "optimizer", "policy"),
    [
        (2, sgd, LocalSGD(every=1)),
        (3, adam, LocalSGD(every=3)),
        (2, sgd, LocalSGD(every=4, delay=1)),
        (3, adam, LocalSGD(every=4, delay=4)),
        (2, sgd, LocalSGD(every=1, delay=1)),
        (3, adam, DiLoCo(every=3)),
        (2, sgd, DiLoCo(every=4, delay=2, outer_lr=0.5, outer_momentum=0.8)),
        (4, sgd, LocalSGD(every=2, groups="grid")),
        (4, adam, LocalSGD(every=3, delay=2, groups="grid")),
        (4, sgd, LocalSGD(every=1, groups="pairs")),
        (2, adam, LocalSGD(every=3, delay=1, groups="pairs")),
        (2, sgd, LocalSGD(every=4, delay=2, merge="daso")),
        (3, adam, LocalSGD(every=4, delay=4, merge="daso")),
        (2, sgd, LocalSGD(every=1, reduction="adasum")),
        (3, adam, LocalSGD(every=4, delay=2, reduction="adasum")),
        (3, sgd, DiLoCo(every=4, reduction="adasum")),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_it_is_what_the_formulas_say(on_ranks, world_size, policy, optimizer) -> None:
    _check(on_ranks, world_size, policy, optimizer)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        (TWO_BY_TWO, LocalSGD(every=3, groups="node")),
        (TWO_BY_TWO, LocalSGD(every=4, delay=2, groups="node", merge="daso")),
        (TWO_NODES, DiLoCo(every=3, groups="node")),
    ],
    ids=str,
)
def test_ranks_of_a_node_share_gradients_in_each_step(on_ranks, policy, layout) -> None:
    _check(on_ranks, sum(map(len, layout)), policy, adam, layout)


def test_the_reference_makes_a_mean_at_the_end_of_a_period() -> None:
    """What is compared with above is not a constant."""
    one, other = (train_in_one_process(LocalSGD(every=every), 2, 4) for every in (4, 5))
    assert torch.equal(one[0], one[1]) and not torch.equal(other[0], other[1])


def _train_plain() -> Tensor:
    ddp = DistributedDataParallel(net())
    optimizer = sgd(ddp.parameters())
    for step in range(STEPS):
        step_of(ddp, optimizer, step, dist.get_rank())
    return flat(ddp.module)


@pytest.mark.quick
def test_a_mean_after_every_step_is_plain_ddp_for_sgd(on_ranks) -> None:
    plain, ours = on_ranks(_train_plain, 3), on_ranks(_train, 3, LocalSGD(every=1), sgd)
    assert all(torch.equal(one, ours[0][0]) for one, _ in ours)
    torch.testing.assert_close(ours[0][0], plain[0], rtol=1e-12, atol=1e-12)


def test_without_a_mean_each_rank_is_a_lone_run(on_ranks) -> None:
    for rank, (ours, _) in enumerate(on_ranks(_train, 2, LocalSGD(every=10**9), adam)):
        alone = net()
        optimizer = adam(alone.parameters())
        for step in range(STEPS):
            step_of(alone, optimizer, step, rank)
        assert torch.equal(ours, flat(alone))


def _mean_before_and_after_merges() -> list[tuple[Tensor, Tensor]]:
    with relaxed(LocalSGD(every=3, delay=2), adam) as one:
        seen, merge = [], one.state._merge.merge

        def watched() -> None:
            before = torch.stack(one.of_ranks(flat(one.ddp.module))).mean(dim=0)
            merge()
            seen.append((before, torch.stack(one.of_ranks(flat(one.ddp.module))).mean(dim=0)))

        one.state._merge.merge = watched
        one.train(STEPS)
        return seen


def test_a_merge_keeps_the_mean_of_what_ranks_have_learned(on_ranks) -> None:
    merges = on_ranks(_mean_before_and_after_merges, 3)[0]
    assert len(merges) >= 3
    for before, after in merges:
        torch.testing.assert_close(before, after, rtol=1e-12, atol=1e-12)


def _consolidated(policy: LocalSGD, layout: Layout | None) -> list[Tensor]:
    with on_nodes(layout) if layout else contextlib.nullcontext(), relaxed(policy, adam, torch.float32) as one:
        seen = []
        for steps in (5, 2):
            one.train(steps)
            before = torch.stack(one.of_ranks(flat(one.ddp.module))).mean(dim=0)
            one.state.consolidate()
            seen.append(flat(one.ddp.module))
            moves_the_mean = isinstance(policy, DiLoCo) or policy.merge == "daso"
            if policy.wire_dtype is None and policy.reduction == "mean" and not (policy.delay and moves_the_mean):
                torch.testing.assert_close(seen[-1], before, rtol=1e-6, atol=1e-6)
        assert 0 < one.state.stats().divergence < 1
        return seen


@pytest.mark.parametrize(
    ("world_size", "policy"),
    [
        *(
            (3, kind(every=4, delay=delay, wire_dtype=wire_dtype))
            for kind in (LocalSGD, DiLoCo)
            for delay in (0, 3)
            for wire_dtype in (None, torch.bfloat16, torch.int8)
        ),
        (4, LocalSGD(every=2, groups="grid")),
        (4, LocalSGD(every=4, delay=3, groups="pairs")),
        (4, LocalSGD(every=2, groups="node", wire_dtype=torch.int8)),
        (3, LocalSGD(every=4, delay=3, merge="daso")),
        (3, LocalSGD(every=4, delay=3, reduction="adasum")),
    ],
    ids=str,
)
def test_consolidated_ranks_have_the_same_bits(on_ranks, world_size, policy) -> None:
    layout = TWO_BY_TWO if policy.groups == "node" else None
    for of_ranks in zip(*on_ranks(_consolidated, world_size, policy, layout), strict=True):
        assert all(torch.equal(one, of_ranks[0]) for one in of_ranks)


def _warmed_up(dear: dict[str, Any]) -> list[Tensor]:
    with relaxed(LocalSGD(every=3, warmup=7), sgd, **dear) as one:
        seen = []
        for _ in range(STEPS):
            one.train(1)
            seen.append(one.parameters())
        assert one.state.stats().steps == STEPS
        return seen


def _plain_then_alone() -> list[Tensor]:
    ddp = DistributedDataParallel(net())
    optimizer = sgd(ddp.parameters())
    seen = []
    for step in range(STEPS):
        step_of(ddp if step < 7 else ddp.module, optimizer, step, dist.get_rank())
        if step >= 7 and (step - 7) % 3 == 2:
            for parameter in ddp.parameters():
                dist.all_reduce(parameter.data)
                parameter.data.div_(dist.get_world_size())
        seen.append(flat(ddp.module))
    return seen


@pytest.mark.parametrize("dear", [{"fusion_mb": 1e-3}, {}], ids=["pipeline", "tuned"])
def test_a_warm_up_is_exact(on_ranks, dear) -> None:
    ours, plain = on_ranks(_warmed_up, 2, dear), on_ranks(_plain_then_alone, 2)
    for one, other in zip(ours, plain, strict=True):
        assert all(map(torch.equal, one[:7], other[:7]))
        for late, expected in zip(one[7:], other[7:], strict=True):
            torch.testing.assert_close(late, expected, rtol=1e-12, atol=1e-12)


def _train_with_odd_loops() -> list[Tensor]:
    """A rank skips a step, and gradients add up over two backward passes."""
    with relaxed(LocalSGD(every=2)) as one:
        for step in range(6):
            one.optimizer.zero_grad()
            for part in range(2):
                x, y = samples(2 * step + part, one.rank)
                with contextlib.nullcontext() if part else one.ddp.no_sync():
                    nn.functional.mse_loss(one.ddp(x), y).backward()
            if step != 3 or one.rank:
                one.optimizer.step()
        assert one.state.stats()[:2] == (6, 2)  # the third mean is made when the next forward begins
        one.state.consolidate()
        assert one.state.stats().means == 4
        return one.of_ranks(flat(one.ddp.module))


def test_means_are_counted_by_reduced_backward_passes(on_ranks) -> None:
    for of_ranks in on_ranks(_train_with_odd_loops, 3):
        assert all(torch.equal(one, of_ranks[0]) for one in of_ranks)


def _overflow_on_one_rank(scaler_type: Any) -> list[float]:
    with relaxed(LocalSGD(every=2), dtype=torch.float32) as one:
        scaler = scaler_type("cpu", init_scale=4.0)
        skipped = []
        for step in range(5):
            x, y = samples(step, one.rank, torch.float32)
            one.optimizer.zero_grad()
            loss = nn.functional.mse_loss(one.ddp(x), y) * (float("inf") if step == 2 and one.rank == 1 else 1.0)
            scaler.scale(loss).backward()
            before = flat(one.ddp.module)
            scaler.step(one.optimizer)
            scaler.update()
            skipped.append(torch.equal(before, flat(one.ddp.module)))
        return [*skipped, scaler.get_scale()]


def test_an_overflow_on_one_rank_skips_the_step_on_all(on_ranks) -> None:
    skipped = [False, False, True, False, False, 2.0]
    assert on_ranks(_overflow_on_one_rank, 2, dx.GradScaler) == [skipped, skipped]
