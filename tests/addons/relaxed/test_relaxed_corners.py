"""Relaxed training in loops that save, load, detach, skip and evaluate at odd moments: right, or refused."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_relaxed_training import Rank, relaxed
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import ddp_crossover as dx
from ddp_crossover.addons.relaxed import DiLoCo, LocalSGD, RelaxedState
from ddp_crossover.plan import session
from ddp_crossover.plan.cost_model import LinkModel
from relaxed_reference import adam, flat, net, samples, sgd, step_of

STEPS = 13
POLICIES = [
    LocalSGD(every=4),
    LocalSGD(every=4, delay=2),
    DiLoCo(every=4),
]


def _stop_and_go_on(policy: LocalSGD, stop_at: int, state_first: bool) -> bool:
    with relaxed(policy, adam, torch.float32) as first:
        first.train(stop_at)
        # A checkpoint may be saved in any order.
        own = copy.deepcopy(first.state.state_dict()) if state_first else None
        model, optimizer = copy.deepcopy((first.ddp.module.state_dict(), first.optimizer.state_dict()))
        own = own or copy.deepcopy(first.state.state_dict())
        first.train(STEPS - stop_at)
        expected = first.parameters()
    with relaxed(policy, adam, torch.float32) as undisturbed:
        undisturbed.train(STEPS)
        assert torch.equal(undisturbed.parameters(), expected), "saving changes nothing"
    with relaxed(policy, adam, torch.float32) as again:
        again.ddp.module.load_state_dict(model)
        again.optimizer.load_state_dict(optimizer)
        again.state.load_state_dict(own)
        again.done = stop_at
        again.train(STEPS - stop_at)
        assert again.state.stats().steps == STEPS
        return torch.equal(again.parameters(), expected)


RESUMED = [
    LocalSGD(every=4),
    LocalSGD(every=4, delay=2),
    DiLoCo(every=4),
    DiLoCo(every=4, delay=2),
    LocalSGD(every=4, delay=2, wire_dtype=torch.bfloat16),
    LocalSGD(every=4, delay=1, wire_dtype=torch.int8),
    LocalSGD(every=4, delay=2, reduction="adasum"),
    LocalSGD(every=2, delay=1, groups="pairs"),
    LocalSGD(every=3, warmup=8),
]


# One in each moment of its period, and all in two, with the parts of the checkpoint in either order.
@pytest.mark.parametrize(
    ("policy", "stop_at", "state_first"),
    [
        (policy, stop_at, (index + stop_at) % 2 == 0)
        for index, policy in enumerate(RESUMED)
        for stop_at in ([3, 4, 5, 6, 8] if index == 1 else [5, (3, 4, 6, 8)[index % 4]])
    ],
    ids=str,
)
def test_it_is_resumed_in_the_middle_of_a_period_bit_for_bit(on_ranks, policy, stop_at, state_first) -> None:
    world_size = 4 if policy.is_partial else 2
    assert all(on_ranks(_stop_and_go_on, world_size, policy, stop_at, state_first))


def _save_on_one_rank() -> bool:
    with relaxed(LocalSGD(every=2), adam) as one:
        one.train(2)
        if one.rank == 0:
            one.state.state_dict()
        dist.barrier()
        one.train(2)
    return True


def test_saving_is_no_collective(on_ranks) -> None:
    assert on_ranks(_save_on_one_rank, 2) == [True, True]


def _roll_back() -> bool:
    with relaxed(LocalSGD(every=4, delay=2), adam) as one:
        one.train(3)
        saved = copy.deepcopy((one.ddp.module.state_dict(), one.optimizer.state_dict(), one.state.state_dict()))
        ends = []
        for _ in range(2):
            one.ddp.module.load_state_dict(saved[0])
            one.optimizer.load_state_dict(copy.deepcopy(saved[1]))
            one.state.load_state_dict(saved[2])
            one.done = 3
            one.train(2)  # a mean is under way
            ends.append(one.parameters())
        return torch.equal(*ends)


def test_a_run_may_go_back_while_a_mean_is_under_way(on_ranks) -> None:
    assert on_ranks(_roll_back, 2) == [True, True]


def _load_into(other: LocalSGD) -> str:
    with relaxed(LocalSGD(every=4)) as one:
        saved = one.state.state_dict()
    with relaxed(other) as one:
        try:
            one.state.load_state_dict(saved)
        except ValueError as error:
            return str(error)
    return "loaded"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (LocalSGD(every=8, delay=2), "loaded"),
        (DiLoCo(every=4), "attach with the policy of the run"),
        (LocalSGD(every=4, wire_dtype=torch.int8), "attach with the policy of the run"),
    ],
    ids=str,
)
def test_the_state_of_another_kind_of_policy_is_refused(on_ranks, other, said) -> None:
    assert all(said in result for result in on_ranks(_load_into, 2, other))


def _save_and_load_with_the_switch() -> bool:
    with relaxed(LocalSGD(every=2)) as one:
        one.train(3)
        saved = one.state.state_dict()
    os.environ["DDP_CROSSOVER"] = "off"
    try:
        off = Rank(LocalSGD(every=2))
        off.state.load_state_dict(saved)
        saved_off = off.state.state_dict()
    finally:
        del os.environ["DDP_CROSSOVER"]
    with relaxed(LocalSGD(every=2)) as one:
        one.state.load_state_dict(saved_off)
        one.train(3)
    return True


def test_checkpoints_pass_the_switch(on_ranks) -> None:
    assert on_ranks(_save_and_load_with_the_switch, 2) == [True, True]


def _load_weights_after_attach(policy: LocalSGD) -> Tensor:
    with relaxed(policy, sgd) as one:
        other = net()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1.0)
        one.ddp.module.load_state_dict(other.state_dict())
        before = flat(one.ddp.module)
        for group in one.optimizer.param_groups:
            group["lr"] = 0.0
        one.train(5)
        return one.parameters() - before


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_weights_that_are_loaded_after_attach_are_where_ranks_begin(on_ranks, policy) -> None:
    for moved in on_ranks(_load_weights_after_attach, 2, policy):
        torch.testing.assert_close(moved, torch.zeros_like(moved), rtol=0, atol=1e-12)


def _evaluate_often(policy: LocalSGD, consolidates: bool) -> Tensor:
    with relaxed(policy, sgd) as one:
        for _ in range(STEPS):
            one.train(1)
            if consolidates and one.done % 4 == 0:
                one.state.consolidate()
                seen = flat(one.ddp.module)
                one.state.consolidate()
                torch.testing.assert_close(flat(one.ddp.module), seen, rtol=1e-12, atol=1e-12)
        return one.parameters()


@pytest.mark.parametrize("policy", [LocalSGD(every=4), DiLoCo(every=4), DiLoCo(every=4, delay=1)], ids=str)
def test_to_consolidate_where_a_mean_is_made_changes_no_training(on_ranks, policy) -> None:
    """At other moments ranks go on from the mean, so they do learn other things."""
    often, never = (on_ranks(_evaluate_often, 3, policy, consolidates) for consolidates in (True, False))
    if policy.delay:
        return  # the mean is merged earlier; that it is the same twice is checked above
    torch.testing.assert_close(often, never, rtol=1e-12, atol=1e-12)


def _go_on_as_plain_ddp() -> list[Tensor]:
    one = Rank(LocalSGD(every=4), adam)  # with state of a step that ranks have not taken together
    one.train(6)
    one.state.detach()
    one.train(6)
    return one.of_ranks(flat(one.ddp.module))


def test_after_detach_ranks_train_as_one(on_ranks) -> None:
    for of_ranks in on_ranks(_go_on_as_plain_ddp, 3):
        assert all(torch.equal(one, of_ranks[0]) for one in of_ranks)


def _detach_before_a_step_of_one() -> str:
    one = Rank(LocalSGD(every=4), adam)
    if one.rank:
        one.train(1)
    else:
        one.ddp(samples(0, 0)[0]).sum().backward()
    try:
        one.state.detach()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_optimizer_state_that_a_rank_lacks_is_named(on_ranks) -> None:
    assert all("call optimizer.step() on all ranks" in said for said in on_ranks(_detach_before_a_step_of_one, 2))


def _different_policies(policies: list[Any]) -> str:
    ddp = DistributedDataParallel(net())
    try:
        dx.attach(ddp, sgd(ddp.parameters()), sync=policies[dist.get_rank()])
    except dx.DisagreementError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "policies",
    [
        [LocalSGD(every=4), DiLoCo(every=4)],
        [LocalSGD(every=4), LocalSGD(every=2)],
        [LocalSGD(every=4, wire_dtype=torch.bfloat16), LocalSGD(every=4, wire_dtype=torch.float16)],
    ],
    ids=str,
)
def test_ranks_with_different_policies_are_refused(on_ranks, policies) -> None:
    assert all(
        "rank 1 differs from rank 0 in its policy" in said for said in on_ranks(_different_policies, 2, policies)
    )


def _skip_steps_of_a_scaler() -> str:
    with relaxed(LocalSGD(every=1000), dtype=torch.float32) as one:
        scaler = dx.GradScaler("cpu", init_scale=4.0)
        try:
            for step in range(6):
                x, y = samples(step, one.rank, torch.float32)
                one.optimizer.zero_grad()
                scaler.scale(nn.functional.mse_loss(one.ddp(x), y)).backward()
                if step != 2 + 2 * one.rank:
                    scaler.step(one.optimizer)
                    scaler.update()
        except RuntimeError as error:
            return str(error)
        finally:
            one.state._when_dropped()
            one.state._detached = True
    return "nothing"


def test_ranks_that_skip_different_steps_of_a_scaler_are_named(on_ranks) -> None:
    for said in on_ranks(_skip_steps_of_a_scaler, 2):
        assert "call it on all ranks in each step" in said


def _warm_up_with_odd_forwards(kind: str) -> int:
    """Rank 0 goes forward more often, and so do all under no_sync(); only reduced backward passes count."""
    with relaxed(LocalSGD(every=1000, warmup=70), sgd) as one:
        for step in range(100):
            x, y = samples(step, one.rank)
            if kind == "forwards of rank 0" and one.rank == 0:
                one.ddp.module(x).sum()
                one.ddp(x).sum()
            one.optimizer.zero_grad()
            if kind == "no_sync":
                for _ in range(3):
                    with one.ddp.no_sync():
                        nn.functional.mse_loss(one.ddp(x), y).backward()
            nn.functional.mse_loss(one.ddp(x), y).backward()
            one.optimizer.step()
            of_ranks = one.of_ranks(flat(one.ddp.module))
            if not all(torch.equal(other, of_ranks[0]) for other in of_ranks):
                return step
    return 100


@pytest.mark.parametrize("kind", ["forwards of rank 0", "no_sync"])
def test_a_warm_up_that_the_tuner_has_left_is_as_long(on_ranks, kind) -> None:
    assert on_ranks(_warm_up_with_odd_forwards, 2, kind) == [70, 70]


def _detach_when_the_tuner_has_left() -> tuple[bool, bool]:
    with mock.patch.object(session, "probe_link", lambda *_: LinkModel(1e-9, 1e-9, 1e-15)):  # a link that takes no time
        one = Rank(LocalSGD(every=2, warmup=1000), sgd)
    one.train(30)
    has_left = one.state._is_plain
    one.state.detach()
    state = dx.attach(one.ddp, one.optimizer)
    one.train(3)
    state.detach()
    of_ranks = one.of_ranks(flat(one.ddp.module))
    return has_left, torch.equal(*of_ranks)


def test_detach_in_a_warm_up_that_the_tuner_has_left_removes_the_hook(on_ranks) -> None:
    assert on_ranks(_detach_when_the_tuner_has_left, 2) == [(True, True)] * 2


class _Normalized(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 4), nn.BatchNorm1d(4))


def _buffers_in_the_warm_up(is_off: bool) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        if is_off:
            patch.setenv("DDP_CROSSOVER", "off")
        ddp = DistributedDataParallel(_Normalized(), broadcast_buffers=False)
        optimizer = sgd(ddp.parameters())
        state = dx.attach(ddp, optimizer, sync=LocalSGD(every=2, warmup=9))
        ddp(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        state.consolidate()
        mean = ddp.module[1].running_mean
        gathered = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mean)
        state.detach()
    return gathered


@pytest.mark.parametrize("is_off", [False, True])
def test_buffers_are_those_of_rank_0_whenever_ranks_consolidate(on_ranks, is_off) -> None:
    for of_ranks in on_ranks(_buffers_in_the_warm_up, 2, is_off):
        assert torch.equal(*of_ranks)


def _scale(ddp: DistributedDataParallel, state: RelaxedState) -> None:
    x, y = samples(0, dist.get_rank())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(nn.functional.mse_loss(ddp(x), y)).backward()


def _join(ddp: DistributedDataParallel, state: RelaxedState) -> None:
    with ddp.join():
        pass


class Refused(NamedTuple):
    """What is refused at attach, or when it is used, and what the error names."""

    named: str
    model: Callable[[], nn.Module] = net
    find_unused: bool = False
    optimizer: Callable[..., Any] = sgd
    sync: Any = LocalSGD(every=2)
    options: dict[str, Any] | None = None
    use: Callable[[DistributedDataParallel, RelaxedState], object] = lambda ddp, state: None


REFUSED = {
    "buffers": Refused("broadcast_buffers=False", model=_Normalized),
    "unused": Refused("find_unused_parameters", find_unused=True),
    "zero": Refused("use the optimizer that it wraps", optimizer=partial(ZeroRedundancyOptimizer, optimizer_class=SGD)),
    "options": Refused("warmup=0", options={"schedule": "dear"}),
    "weighted": Refused("leave out weighted=, and give all ranks batches of one size", options={"weighted": True}),
    "weighted warm-up": Refused("leave out weighted=", sync=LocalSGD(every=2, warmup=1), options={"weighted": True}),
    "lease": Refused("call lease.instrument(model, optimizer)", options={"lease": object()}),
    "class": Refused("sync=LocalSGD(...)", sync=LocalSGD),
    "string": Refused("takes a policy such as ddp_crossover.relaxed.LocalSGD(every=8), got 'local'", sync="local"),
    "scaler": Refused("use ddp_crossover.GradScaler", use=_scale),
    "join": Refused("join() shadows only plain all-reduces", use=_join),
    "copy": Refused("copy ddp.module instead", use=lambda ddp, state: copy.deepcopy(ddp)),
    "ema": Refused("without sync=", use=lambda ddp, state: dx.Ema(state, decay=0.9)),  # type: ignore[arg-type]
}


def _refused(kind: str) -> str:
    case = REFUSED[kind]
    ddp = DistributedDataParallel(case.model(), find_unused_parameters=case.find_unused)
    try:
        state = dx.attach(ddp, case.optimizer(ddp.parameters()), sync=case.sync, **(case.options or {}))
        case.use(ddp, state)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_right_is_refused(on_ranks, kind) -> None:
    for said in on_ranks(_refused, 2, kind):
        assert REFUSED[kind].named in said


@pytest.mark.parametrize(
    ("policy", "arguments", "named"),
    [
        (LocalSGD, {"every": 0}, "every must be a whole number from 1, got 0"),
        (LocalSGD, {"every": 2, "delay": 3}, "delay=3 steps are more than every=2"),
        (LocalSGD, {"every": 2, "warmup": -1}, "warmup must be"),
        (LocalSGD, {"every": 2, "wire_dtype": torch.int16}, "wire_dtype must be"),
        (LocalSGD, {"every": 2, "groups": "rows"}, "groups must be one of None, 'node', 'grid', 'pairs', got 'rows'"),
        (LocalSGD, {"every": 2, "groups": "grid", "wire_dtype": torch.int8}, "no point that all ranks share"),
        (LocalSGD, {"every": 2, "groups": "pairs", "merge": "daso"}, "no point that all ranks share"),
        (LocalSGD, {"every": 2, "reduction": "adasum", "groups": "node"}, "reduction='adasum' is that of all ranks"),
        (DiLoCo, {"every": 2, "outer_lr": 0.0}, "outer_lr"),
        (DiLoCo, {"every": 2, "outer_momentum": 1.0}, "outer_m"),
    ],
)
def test_wrong_numbers_are_refused(policy, arguments, named) -> None:
    with pytest.raises(ValueError, match=named):
        policy(**arguments)


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


def _shown() -> list[str]:
    ddp = DistributedDataParallel(net(), broadcast_buffers=False)
    optimizer = sgd(ddp.parameters())
    state = dx.attach(ddp, optimizer, sync=LocalSGD(every=2, warmup=1))
    shown = [repr(state)]
    for step in range(4):
        step_of(ddp, optimizer, step, dist.get_rank())
    shown.append(repr(state))
    state.detach()
    return [*shown, repr(state)]


def test_a_state_shows_its_policy_what_it_does_and_its_figures(on_ranks) -> None:
    for rank, (warming_up, training, detached) in enumerate(on_ranks(_shown, 2)):
        assert warming_up.splitlines()[0].endswith(f"rank {rank} of 2 over gloo")
        assert warming_up.splitlines()[1:] == [
            "  LocalSGD(every=2, warmup=1)",
            "  exact steps until step 1, the end of the warm-up",
            "  0 steps, no mean yet",
        ]
        assert "each rank trains alone between means\n  4 steps, 1 mean, " in training
        assert "detached: the model trains as plain DDP does" in detached
