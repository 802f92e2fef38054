"""Relaxed synchronization on real ranks: what must hold exactly, whatever else it changes."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.relaxed import DiLoCo, LocalSGD, RelaxedState
from relaxed_reference import adam, flat, net, samples, sgd, step_of, train_in_one_process

STEPS = 13
POLICIES = [
    LocalSGD(every=1),
    LocalSGD(every=3),
    LocalSGD(every=4, delay=1),
    LocalSGD(every=4, delay=4),
    LocalSGD(every=1, delay=1),
    DiLoCo(every=3),
    DiLoCo(every=4, delay=2, outer_lr=0.5, outer_momentum=0.8),
]


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


def _train(policy: LocalSGD, optimizer: Any) -> Tensor:
    with relaxed(policy, optimizer) as one:
        one.train(STEPS)
        return one.parameters()


@pytest.mark.parametrize(("world_size", "optimizer"), [(2, sgd), (3, adam)], ids=["2-sgd", "3-adam"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_it_is_what_the_formulas_say(on_ranks, world_size, policy, optimizer) -> None:
    expected = train_in_one_process(policy, world_size, STEPS, optimizer)
    for ours, simple in zip(on_ranks(_train, world_size, policy, optimizer), expected, strict=True):
        torch.testing.assert_close(ours, simple, rtol=1e-12, atol=1e-12)


def _train_plain() -> Tensor:
    ddp = DistributedDataParallel(net())
    optimizer = sgd(ddp.parameters())
    for step in range(STEPS):
        step_of(ddp, optimizer, step, dist.get_rank())
    return flat(ddp.module)


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_mean_after_every_step_is_plain_ddp_for_sgd(on_ranks, world_size) -> None:
    plain = on_ranks(_train_plain, world_size)
    ours = on_ranks(_train, world_size, LocalSGD(every=1), sgd)
    assert all(torch.equal(one, ours[0]) for one in ours)
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-12, atol=1e-12)


def test_without_a_mean_each_rank_is_a_lone_run(on_ranks) -> None:
    for rank, ours in enumerate(on_ranks(_train, 2, LocalSGD(every=10**9), adam)):
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


def test_an_outer_optimizer_that_does_nothing_is_local_sgd(on_ranks) -> None:
    one = on_ranks(_train, 2, DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0), adam)
    other = on_ranks(_train, 2, LocalSGD(every=3), adam)
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def _consolidated(policy: LocalSGD) -> list[Tensor]:
    with relaxed(policy, adam, torch.float32) as one:
        seen = []
        for steps in (5, 2):
            one.train(steps)
            before = torch.stack(one.of_ranks(flat(one.ddp.module))).mean(dim=0)
            one.state.consolidate()
            seen.append(flat(one.ddp.module))
            if policy.wire_dtype is None and not (isinstance(policy, DiLoCo) and policy.delay):
                torch.testing.assert_close(seen[-1], before, rtol=1e-6, atol=1e-6)
        assert 0 < one.state.stats().divergence < 1
        return seen


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("delay", [0, 3])
def test_consolidated_ranks_have_the_same_bits(on_ranks, kind, wire_dtype, delay) -> None:
    for of_ranks in zip(*on_ranks(_consolidated, 3, kind(every=4, delay=delay, wire_dtype=wire_dtype)), strict=True):
        assert all(torch.equal(one, of_ranks[0]) for one in of_ranks)


def _stop_and_go_on(policy: LocalSGD, stop_at: int) -> bool:
    with relaxed(policy, adam, torch.float32) as one:
        one.train(STEPS)
        expected = one.parameters()
    with relaxed(policy, adam, torch.float32) as first:
        first.train(stop_at)
        saved = copy.deepcopy((first.state.state_dict(), first.ddp.module.state_dict(), first.optimizer.state_dict()))
    with relaxed(policy, adam, torch.float32) as again:
        own, model, optimizer = saved
        again.ddp.module.load_state_dict(model)
        again.optimizer.load_state_dict(optimizer)
        again.state.load_state_dict(own)
        again.done = stop_at
        again.train(STEPS - stop_at)
        return torch.equal(again.parameters(), expected)


RESUMED = [
    LocalSGD(every=4),
    LocalSGD(every=4, delay=2),
    DiLoCo(every=4, delay=2),
    LocalSGD(every=4, delay=2, wire_dtype=torch.bfloat16),
    LocalSGD(every=4, delay=1, wire_dtype=torch.int8),
    LocalSGD(every=4, delay=2, reduction="adasum"),
    LocalSGD(every=2, delay=1, groups="pairs"),
]


# One in the middle of all, and each in two moments of its period.
@pytest.mark.parametrize(
    ("policy", "stop_at"),
    [
        (policy, stop_at)
        for index, policy in enumerate(RESUMED)
        for stop_at in ([3, 4, 5, 6, 8] if index == 1 else [5, (3, 4, 6, 8)[index % 4]])
    ],
    ids=str,
)
def test_it_is_resumed_in_the_middle_of_a_period_bit_for_bit(on_ranks, policy, stop_at) -> None:
    world_size = 4 if policy.is_partial else 2
    assert all(on_ranks(_stop_and_go_on, world_size, policy, stop_at))


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


def _with_the_stock_scaler() -> str:
    with relaxed(LocalSGD(every=2)) as one:
        x, y = samples(0, one.rank)
        try:
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(nn.functional.mse_loss(one.ddp(x), y)).backward()
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_the_stock_scaler_is_refused(on_ranks) -> None:
    assert all("use ddp_crossover.GradScaler" in said for said in on_ranks(_with_the_stock_scaler, 2))


def _refused(kind: str) -> str:
    module: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) if kind == "buffers" else nn.Linear(2, 2)
    ddp = DistributedDataParallel(module, find_unused_parameters=kind == "unused")
    dear = {"options": {"schedule": "dear"}, "weighted": {"weighted": True}}.get(kind, {})
    try:
        dx.attach(ddp, sgd(ddp.parameters()), sync=LocalSGD(every=2, warmup=int(kind == "weighted")), **dear)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("buffers", "broadcast_buffers=False"),
        ("unused", "find_unused_parameters"),
        ("options", "warmup=0"),
        ("weighted", "leave out weighted="),
    ],
)
def test_what_would_talk_in_local_steps_is_refused(on_ranks, kind, named) -> None:
    assert all(named in said for said in on_ranks(_refused, 2, kind))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"every": 0}, "every must be a whole number from 1, got 0"),
        ({"every": 2, "delay": 3}, "delay=3 steps are more than every=2"),
        ({"every": 2, "warmup": -1}, "warmup must be"),
        ({"every": 2, "wire_dtype": torch.int16}, "wire_dtype must be"),
        ({"every": 2, "groups": "rows"}, "groups must be one of None, 'node', 'grid', 'pairs', got 'rows'"),
        ({"every": 2, "groups": "grid", "wire_dtype": torch.int8}, "no point that all ranks share"),
        ({"every": 2, "groups": "pairs", "merge": "daso"}, "no point that all ranks share"),
        ({"every": 2, "reduction": "adasum", "groups": "node"}, "reduction='adasum' is that of all ranks"),
    ],
)
def test_wrong_numbers_are_refused(arguments, named) -> None:
    with pytest.raises(ValueError, match=named):
        LocalSGD(**arguments)


@pytest.mark.parametrize(
    ("arguments", "named"), [({"outer_lr": 0.0}, "outer_lr"), ({"outer_momentum": 1.0}, "outer_m")]
)
def test_wrong_numbers_of_the_outer_optimizer_are_refused(arguments, named) -> None:
    with pytest.raises(ValueError, match=named):
        DiLoCo(every=2, **arguments)


def _switched_off() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_CROSSOVER", "off")
        one = Rank(LocalSGD(every=100))
        one.train(3)
        one.state.consolidate()
    return one.state.detached and all(
        torch.equal(other, flat(one.ddp.module)) for other in one.of_ranks(flat(one.ddp.module))
    )


def test_switched_off_ddp_trains_as_without_us(on_ranks) -> None:
    assert on_ranks(_switched_off, 2) == [True, True]
