"""`norms="sharded"`: torch's own clipping and loss scaling take norms from shards, and the overlap is kept.

The norms are those of plain DDP but for their last bits, on all ranks the same, and updates are deferred.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

import compiled_optimizers
import gradient_loops as loops
from ddp_crossover.report.stats import DearStats
from equivalence import (
    ADAMW,
    SGD,
    Case,
    Factory,
    Run,
    assert_same,
    assert_same_on_all_ranks,
    optimizer,
    run_arm,
    snapshot,
)
from harness import run_faulty_ranks
from models import INPUTS, OUTPUTS, DeepNet, OddNet

INFINITY = float("inf")
SHARDED = {"norms": "sharded"}

Loop = Callable[[Run], Iterator[Any]]


def sharded(loop: Loop, model: Callable[[], nn.Module] = OddNet, factory: Factory = SGD, **dear: Any) -> Case:
    return Case(loop, model, factory, steps=12, dear={**SHARDED, **dear})


class MixedNet(nn.Module):
    """Parameters of three dtypes, and one whose order in memory is not that of its indices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 11)
        self.turned = nn.Parameter((torch.randn(OUTPUTS, 11) / 4).t())
        self.wide = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.second = nn.Parameter(torch.ones(OUTPUTS, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)) @ self.turned * self.wide.float() * self.second.float()


def two_optimizers(model: nn.Module) -> list[Optimizer]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [torch.optim.AdamW(weights, lr=0.01), torch.optim.SGD(others, lr=0.1, momentum=0.9)]


def two_groups(model: nn.Module) -> Optimizer:
    """As Hugging Face's Trainer makes them: no weight decay for biases."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.SGD([{"params": weights, "weight_decay": 0.01}, {"params": others}], lr=0.1, momentum=0.9)


def backward(run: Run) -> Iterator[torch.Tensor]:
    for x, y in run.batches():
        run.model.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        yield loss


def train(run: Run, gradients: Callable[[Run], Any]) -> Iterator[Any]:
    """The loop of every tutorial, which does something with gradients before it steps."""
    for loss in backward(run):
        seen = gradients(run)
        for each in run.optimizers:
            each.step()
        yield loss, seen


def clip_all(run: Run, max_norm: float = loops.ACTIVE_NORM, norm_type: float = 2.0, **options: Any) -> torch.Tensor:
    return clip_grad_norm_(run.model.parameters(), max_norm, norm_type, **options)


def clip(**options: Any) -> Loop:
    return partial(train, gradients=partial(clip_all, **options))


def norm_and_factor_apart(run: Run) -> list[torch.Tensor]:
    norm = get_total_norm([p.grad for p in run.model.parameters()])
    clip_grads_with_norm_(run.model.parameters(), loops.ACTIVE_NORM, norm)
    return [norm, get_total_norm([p.grad for p in run.model.parameters()], INFINITY)]


def parts_one_by_one(run: Run) -> list[torch.Tensor]:
    """Two parts with norms of their own, then all of them together; one part is scaled twice."""
    parameters = list(run.model.parameters())
    return [
        clip_grad_norm_(parameters[:2], 0.05),
        clip_grad_norm_(parameters[2:], 0.1, INFINITY, foreach=False),
        clip_grad_norm_(iter(parameters), loops.ACTIVE_NORM),
        clip_grad_norm_(parameters[0], loops.ACTIVE_NORM),
    ]


def some_twice(run: Run) -> torch.Tensor:
    parameters = list(run.model.parameters())
    return clip_grad_norm_([*parameters, parameters[0], parameters[-1]], loops.ACTIVE_NORM)


def every_micro_batch(run: Run) -> Iterator[Any]:
    """Clips what no rank has shared yet, too: each rank by its own norm."""
    for index, (x, y) in enumerate(run.batches(per_step=3)):
        if index % 3 == 0:
            run.optimizer.zero_grad(set_to_none=False)
        with nullcontext() if index % 3 == 2 else run.model.no_sync():
            run.loss(run.model(x), y).backward()
        norm = clip_all(run)
        if index % 3 == 2:
            run.optimizer.step()
        yield norm


def inside_of_a_closure(run: Run) -> Iterator[Any]:
    """As in Lightning."""
    for x, y in run.batches():
        norms: list[torch.Tensor] = []

        def closure(x: torch.Tensor = x, y: torch.Tensor = y, norms: list[torch.Tensor] = norms) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(run.model(x), y)
            loss.backward()
            norms.append(clip_all(run))
            return loss

        yield run.optimizer.step(closure), norms


def scale_loss(run: Run, clips: bool = False) -> Iterator[Any]:
    """Losses overflow in two steps, on the last rank only: every rank skips them."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    for index, (x, y) in enumerate(run.batches()):
        run.model.zero_grad()
        loss = loops.inject_inf(run, index, run.loss(run.model(x), y))
        scaler.scale(loss).backward()
        norm = None
        if clips:
            scaler.unscale_(run.optimizer)
            norm = clip_all(run)
        for each in run.optimizers:
            scaler.step(each)
        scaler.update()
        yield loss, scaler.get_scale(), norm


def compare_norms(case: Case, tolerance: float = 1e-6, defers: bool = True) -> None:
    """On every rank: what the loop yields is within `tolerance` of plain DDP, its state at the end within 1e-5."""
    expected, expected_state, _ = run_arm(case, with_dear=False)
    seen, seen_state, stats = run_arm(case, with_dear=True)
    # A loss follows parameters, which follow norms: only the norms of the first step that is pipelined are as near.
    assert_same(seen, expected, "in the loop", rtol=1e-5, atol=1e-7)
    first = stats.iterations - stats.pipelined_iterations
    assert_same(seen[first], expected[first], f"step {first}", rtol=tolerance, atol=1e-9)
    assert_same(seen_state, expected_state, "at the end", rtol=1e-5, atol=1e-6)
    assert_same_on_all_ranks(seen_state)
    if defers:
        assert stats.fallbacks == {}
        # This test itself, at the end; and a closure in which the pipeline begins, in a step that has begun without.
        assert sum(stats.looks.values()) <= 2, stats.looks
        assert stats.deferred_steps >= stats.pipelined_iterations - 2 > case.steps // 2  # two may be skipped


# The numbers of many more are compared by the fuzzer (`norms`), which does not ask whether updates are deferred.
OVERLAPPED = {
    "clip": sharded(clip()),
    "clip_one_by_one": sharded(clip(foreach=False), DeepNet),
    "clip_maximum": sharded(clip(norm_type=INFINITY), DeepNet),  # there is none of the empty parameter of `OddNet`
    "clip_finite": sharded(clip(error_if_nonfinite=True)),
    "clip_16_bits": sharded(clip(), wire_dtype=torch.bfloat16),
    "norm_and_factor_apart": sharded(partial(train, gradients=norm_and_factor_apart), DeepNet),
    "parts_one_by_one": sharded(partial(train, gradients=parts_one_by_one), DeepNet),
    "some_twice": sharded(partial(train, gradients=some_twice), DeepNet),
    "inside_of_a_closure": sharded(inside_of_a_closure, DeepNet),
    "scaler": sharded(scale_loss, DeepNet),
    "scaler_16_bits": sharded(scale_loss, wire_dtype=torch.bfloat16),
    "scaler_that_leaves_unscaling_to_the_optimizer": sharded(
        scale_loss, factory=optimizer(torch.optim.SGD, lr=0.1, fused=True)
    ),
    "scaler_and_clipping": sharded(partial(scale_loss, clips=True), DeepNet),
}


@pytest.mark.parametrize(("name", "world_size"), [(name, 2 + index % 2) for index, name in enumerate(OVERLAPPED)])
def test_torchs_own_functions_keep_the_overlap(on_ranks, name, world_size) -> None:
    on_ranks(compare_norms, world_size, replace(OVERLAPPED[name], world_size=world_size))


@pytest.mark.quick
@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_that_only_logs_leaves_the_bits_of_plain_ddp(on_ranks, foreach) -> None:
    """As Hugging Face's Trainer does: the factor is 1."""
    on_ranks(_compare_logging, 2, sharded(clip(max_norm=INFINITY, foreach=foreach), factory=ADAMW))


def _compare_logging(case: Case) -> None:
    expected, expected_state, _ = run_arm(case, with_dear=False)
    seen, seen_state, stats = run_arm(case, with_dear=True)
    assert_same(seen_state, expected_state, "at the end")
    for step in expected:
        assert_same(seen[step][0], expected[step][0], f"loss of step {step}")
        assert_same(seen[step][1], expected[step][1], f"norm of step {step}", rtol=1e-6)
    assert stats.fallbacks == {}
    assert stats.deferred_steps == stats.pipelined_iterations


@pytest.mark.parametrize("loop", [clip(), clip(foreach=False), scale_loss], ids=["clip", "one_by_one", "scaler"])
def test_several_optimizers_and_dtypes(on_ranks, loop) -> None:
    on_ranks(compare_mixed, 2, sharded(loop, MixedNet, two_optimizers))


def compare_mixed(case: Case) -> None:
    """A bf16 norm has 8 bits, and Adam's first steps turn the sign of a tiny gradient into a step."""
    expected, _, _ = run_arm(case, with_dear=False)
    seen, seen_state, stats = run_arm(case, with_dear=True)
    assert_same(seen, expected, "in the loop", rtol=1e-2, atol=1e-3)
    assert_same_on_all_ranks(seen_state)
    assert stats.fallbacks == {}
    assert sum(stats.looks.values()) <= 1, stats.looks


class NetWithIgnored(DeepNet):
    """DDP leaves two parameters alone: each rank trains its own."""

    def __init__(self) -> None:
        super().__init__()
        names = [name for name, _ in self.named_parameters()][2:4]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)


@pytest.mark.parametrize("loop", [clip(), scale_loss], ids=["clip", "scaler"])
def test_parameters_that_ddp_ignores_count_with_this_ranks_gradient(on_ranks, loop) -> None:
    on_ranks(_compare_ignored, 2, sharded(loop, NetWithIgnored))


def _compare_ignored(case: Case) -> None:
    expected, expected_state, _ = run_arm(case, with_dear=False)
    seen, seen_state, stats = run_arm(case, with_dear=True)
    assert_same(seen, expected, "in the loop", rtol=1e-5, atol=1e-7)
    assert_same(seen_state, expected_state, "at the end", rtol=1e-5, atol=1e-6)
    assert stats.deferred_steps >= stats.pipelined_iterations - 2


def disturbed(run: Run, foreach: bool | None = None) -> Iterator[Any]:
    """Gradients are edited and replaced on all ranks, and rank 0 logs some of them."""
    net = run.model.module
    for index, loss in enumerate(backward(run)):
        net.first.weight.grad.mul_(3.0)
        if index % 3 == 1:
            net.second.weight.grad = net.second.weight.grad * 0.5
        if run.rank == 0:
            for p in list(net.parameters())[: (0, 1, None)[index % 3]]:
                p.grad.norm()
        norm = clip_all(run, foreach=foreach)
        run.optimizer.step()
        yield loss, norm, [p.grad.clone() for p in net.parameters()] if index % 2 else []


def after_step(run: Run) -> Iterator[Any]:
    """Too late for the update, which must stay as it is; `.grad` is clipped all the same."""
    for loss in backward(run):
        early = clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
        late = clip_all(run)
        yield loss, early, late, [p.grad.clone() for p in run.model.parameters()]


def old_gradients(run: Run) -> Iterator[Any]:
    """The gradients of the last step, kept over a `zero_grad()`."""
    kept: list[torch.Tensor] = []
    for x, y in run.batches():
        old = get_total_norm(kept)
        kept = [p.grad for p in run.model.parameters() if p.grad is not None]
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        norm = clip_all(run)
        run.optimizer.step()
        yield loss, norm, old


def nan_at_last(run: Run) -> Iterator[Any]:
    for index, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        if index == run.case.steps - 1 and run.rank == run.case.world_size - 1:
            loss = loss * float("nan")
        loss.backward()
        refused = ""
        try:
            norm = clip_all(run, error_if_nonfinite=True)
        except RuntimeError as error:
            refused, norm = str(error), None
        else:
            run.optimizer.step()
        yield loss, norm, refused


def two_models(run: Run, foreach: bool | None = None) -> Iterator[Any]:
    """One norm over both, each of which has its own state; and a parameter that neither has."""
    torch.manual_seed(3)
    other = DistributedDataParallel(DeepNet())
    alone = nn.Parameter(torch.ones(OUTPUTS))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    state = None
    if run.with_dear:
        import ddp_crossover as dx

        state = dx.attach(other, optimizer, norms="sharded", fusion_mb=1e-4)
    parameters = [*run.model.parameters(), alone, *other.parameters()]
    for x, y in run.batches():
        for parameter in parameters:
            parameter.grad = None
        loss = run.loss(run.model(x) + other(x) * alone, y)
        loss.backward()
        alone.grad.zero_().add_(0.25)  # the same on all ranks
        norm = clip_grad_norm_(parameters, loops.ACTIVE_NORM, foreach=foreach)
        run.optimizer.step()
        optimizer.step()
        yield loss, norm
    for parameter in parameters:
        parameter.grad = None
    if state is not None:
        assert sum(state.stats().looks.values()) == 0
        for each in (run.state, state):
            _assert_no_gradient_is_held(each)
        state.detach()
    yield snapshot(other.module.state_dict())


def _assert_no_gradient_is_held(state: Any) -> None:
    """Else each backward would have to deliver the gradients of the step before."""
    assert not any(slot.pending.held_elsewhere() for slot in state._reducer._in_force.pipeline.slots)


def kept_on_rank_0(run: Run, set_to_none: bool) -> Iterator[Any]:
    """Rank 0 keeps the memory of all gradients, which DDP's next backward fills: they are plain there."""
    kept: list[torch.Tensor] = []
    for x, y in run.batches():
        run.optimizer.zero_grad(set_to_none)
        loss = run.loss(run.model(x), y)
        loss.backward()
        seen = snapshot(kept)
        norm = clip_all(run)
        kept = [p.grad.detach() for p in run.model.parameters()] if run.rank == 0 else []
        run.optimizer.step()
        yield loss, norm, seen, snapshot(kept)


def forked_on_rank_0(run: Run) -> torch.Tensor:
    """Between backward and clipping, which the child must not take part in."""
    if run.rank == 0:
        child = os.fork()
        if child == 0:
            clip_all(run)
            os._exit(0)
        os.waitpid(child, 0)
    return clip_all(run)


DISTURBED = {
    "two_models": two_models,
    "two_models_one_by_one": partial(two_models, foreach=False),
    "compiled": compiled_optimizers.compiled_clipping,
    "disturbed": disturbed,
    "every_micro_batch": every_micro_batch,
    "forked_on_rank_0": partial(train, gradients=forked_on_rank_0),
    "disturbed_one_by_one": partial(disturbed, foreach=False),
    "after_step": after_step,
    "old_gradients": old_gradients,
    "nan_at_last": nan_at_last,
    "norm_0": clip(norm_type=0.0),
    "smallest": clip(norm_type=-INFINITY),
}


@pytest.mark.parametrize(
    ("name", "world_size"), [(name, (2, 3, 2, 1)[index % 4]) for index, name in enumerate(DISTURBED)]
)
def test_gradients_that_were_used_before_or_are_used_later(on_ranks, name, world_size) -> None:
    case = sharded(DISTURBED[name], DeepNet if name == "smallest" else OddNet)
    on_ranks(compare_norms, world_size, replace(case, world_size=world_size, steps=10), 1e-5, False)


@pytest.mark.parametrize("set_to_none", [False, True], ids=["in_place", "to_none"])
@pytest.mark.parametrize("is_view", [False, True], ids=["copied", "bucket_view"])
def test_gradients_may_be_kept_on_one_rank(on_ranks, is_view, set_to_none) -> None:
    case = sharded(partial(kept_on_rank_0, set_to_none=set_to_none), DeepNet)
    on_ranks(compare_norms, 2, replace(case, ddp={"gradient_as_bucket_view": is_view}), 1e-5, False)


# Calls that not all ranks make.


def _train(on_rank_0: str) -> str:
    run = Run(Case(optimizer=SGD, steps=12, dear=SHARDED), with_dear=True)
    try:
        for index, _ in enumerate(backward(run)):
            parameters = list(run.model.parameters())
            if index > 6 and run.rank == 0:
                if on_rank_0 == "one more":
                    get_total_norm([p.grad for p in parameters[:1]])
                elif on_rank_0 == "another norm":
                    get_total_norm([p.grad for p in parameters], INFINITY)
            if index > 6 and on_rank_0 == "alone":
                if run.rank == 0:
                    clip_grad_norm_(parameters, 1.0)
            else:
                clip_grad_norm_(parameters, 1.0)
            run.optimizer.step()
    except RuntimeError as error:
        return str(error)
    finally:
        run.detach()
    return "no error"


@pytest.mark.parametrize("on_rank_0", ["one more", "another norm", "alone"])
def test_a_call_that_not_all_ranks_make_is_an_error_that_says_so(on_rank_0) -> None:
    outcomes = run_faulty_ranks(_train_and_leave, 2, on_rank_0, group_timeout_s=4.0)
    errors = [outcome.result or outcome.error for outcome in outcomes]
    assert "every rank must make the same calls" in errors[0], errors
    if on_rank_0 != "alone":  # found out when the two calls meet, not by the timeout
        assert all("ranks took different norms" in error for error in errors), errors


def _train_and_leave(on_rank_0: str) -> str:
    try:
        return _train(on_rank_0)
    except RuntimeError as error:  # of detach(): the link is broken
        return f"{error.__context__} {error}"


def test_one_rank_may_look_at_gradients_by_itself(on_ranks) -> None:
    on_ranks(_look_on_rank_0, 2)


def _look_on_rank_0() -> None:
    run = Run(Case(optimizer=SGD, steps=12, dear=SHARDED), with_dear=True)
    for _ in backward(run):
        if run.rank == 0:
            norms = torch._foreach_norm([p.grad for p in run.model.parameters()])
            assert all(norm.isfinite() for norm in norms)
            run.model.module.first.weight.grad.norm()
        run.optimizer.step()
    run.detach()


# What is said with `norms="exact"`.


@pytest.mark.quick
@pytest.mark.parametrize(
    ("loop", "function"), [(loops.clip_norm, "clipping"), (scale_loss, "GradScaler")], ids=["clip", "scaler"]
)
def test_exact_norms_say_once_which_line_costs_the_overlap(on_ranks, loop, function) -> None:
    stats, other = on_ranks(_undeferred, 2, Case(loop, optimizer=two_groups, steps=12))
    [(reason, times)] = stats.fallbacks.items()
    assert 5 < times <= stats.pipelined_iterations
    assert re.search(rf"torch's {function} at \w+_\w+\.py:\d+ needs all gradients", reason), reason
    assert "norms='sharded'" in stats.advice[reason]
    assert stats.fallbacks == other.fallbacks
    assert list(stats.obstacles) == [reason], "one cause is told twice"


def _undeferred(case: Case) -> DearStats:
    _, _, stats = run_arm(case, with_dear=True)
    assert stats.deferred_steps == 0
    return stats
