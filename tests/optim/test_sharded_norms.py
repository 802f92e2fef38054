"""`norms="sharded"`: torch's own clipping and loss scaling take norms from shards, and the overlap is kept.

The norms are those of plain DDP but for their last bits, on all ranks the same, and updates are deferred.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

import compiled_optimizers
import gradient_loops as loops
from ddp_crossover.figures.stats import DearStats
from equivalence import ADAMW, SGD, Case, Run, assert_same, assert_same_on_all_ranks, optimizer, run_arm, snapshot
from harness import run_faulty_ranks
from models import INPUTS, OUTPUTS, DeepNet, OddNet

INFINITY = float("inf")
SHARDED = {"norms": "sharded"}


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


def step_all(run: Run) -> None:
    for each in run.optimizers:
        each.step()


def clip(run: Run, max_norm: float = loops.ACTIVE_NORM, norm_type: float = 2.0, **options: Any) -> Iterator[Any]:
    for loss in backward(run):
        norm = clip_grad_norm_(run.model.parameters(), max_norm, norm_type, **options)
        step_all(run)
        yield loss, norm


def norm_and_factor_apart(run: Run) -> Iterator[Any]:
    for loss in backward(run):
        norm = get_total_norm([p.grad for p in run.model.parameters()])
        clip_grads_with_norm_(run.model.parameters(), loops.ACTIVE_NORM, norm)
        after = get_total_norm([p.grad for p in run.model.parameters()], INFINITY)
        step_all(run)
        yield loss, norm, after


def parts_one_by_one(run: Run) -> Iterator[Any]:
    """Two parts with norms of their own, then all of them together; one part is scaled twice."""
    for loss in backward(run):
        parameters = list(run.model.parameters())
        norms = [
            clip_grad_norm_(parameters[:2], 0.05),
            clip_grad_norm_(parameters[2:], 0.1, INFINITY, foreach=False),
            clip_grad_norm_(iter(parameters), loops.ACTIVE_NORM),
            clip_grad_norm_(parameters[0], loops.ACTIVE_NORM),
        ]
        step_all(run)
        yield loss, norms


def accumulated(run: Run) -> Iterator[Any]:
    """Only the second backward communicates."""
    for index, (x, y) in enumerate(run.batches(per_step=2)):
        with nullcontext() if index % 2 else run.model.no_sync():
            loss = run.loss(run.model(x), y)
            loss.backward()
        if index % 2:
            norm = clip_grad_norm_(run.model.parameters(), loops.ACTIVE_NORM)
            run.optimizer.step()
            run.optimizer.zero_grad()
            yield loss, norm


def every_micro_batch(run: Run) -> Iterator[Any]:
    """Clips what no rank has shared yet, too: each rank by its own norm."""
    for index, (x, y) in enumerate(run.batches(per_step=3)):
        if index % 3 == 0:
            run.optimizer.zero_grad(set_to_none=False)
        with nullcontext() if index % 3 == 2 else run.model.no_sync():
            run.loss(run.model(x), y).backward()
        norm = clip_grad_norm_(run.model.parameters(), loops.ACTIVE_NORM)
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
            norms.append(clip_grad_norm_(run.model.parameters(), loops.ACTIVE_NORM))
            return loss

        yield run.optimizer.step(closure), norms


def some_twice(run: Run) -> Iterator[Any]:
    for loss in backward(run):
        parameters = list(run.model.parameters())
        norm = clip_grad_norm_([*parameters, parameters[0], parameters[-1]], loops.ACTIVE_NORM)
        step_all(run)
        yield loss, norm


def scale_loss(run: Run, clips: bool = False) -> Iterator[Any]:
    """Losses overflow in steps 11 and 16, on the last rank only: every rank skips them."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    for index, (x, y) in enumerate(run.batches()):
        run.model.zero_grad()
        loss = loops.inject_inf(run, index, run.loss(run.model(x), y))
        scaler.scale(loss).backward()
        norm = None
        if clips:
            scaler.unscale_(run.optimizer)
            norm = clip_grad_norm_(run.model.parameters(), loops.ACTIVE_NORM)
        for each in run.optimizers:
            scaler.step(each)
        scaler.update()
        yield loss, scaler.get_scale(), norm


OVERLAPPED = {
    "clip": clip,
    "clip_foreach": partial(clip, foreach=True),
    "clip_one_by_one": partial(clip, foreach=False),
    "clip_norm_1": partial(clip, norm_type=1.0),
    "clip_maximum": partial(clip, norm_type=INFINITY),
    "clip_finite": partial(clip, error_if_nonfinite=True),
    "norm_and_factor_apart": norm_and_factor_apart,
    "parts_one_by_one": parts_one_by_one,
    "some_twice": some_twice,
    "accumulated": accumulated,
    "inside_of_a_closure": inside_of_a_closure,
    "scaler": scale_loss,
    "scaler_and_clipping": partial(scale_loss, clips=True),
}


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


@pytest.mark.parametrize(("name", "world_size"), [(name, 2 + index % 2) for index, name in enumerate(OVERLAPPED)])
def test_torchs_own_functions_keep_the_overlap(on_ranks, name, world_size) -> None:
    model = OddNet if name == "clip" else DeepNet  # which has an empty parameter, without a maximum norm
    case = Case(OVERLAPPED[name], model=model, optimizer=SGD, world_size=world_size, steps=12, dear=SHARDED)
    on_ranks(compare_norms, world_size, case)


@pytest.mark.quick
@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_that_only_logs_leaves_the_bits_of_plain_ddp(on_ranks, foreach) -> None:
    """As Hugging Face's Trainer does: the factor is 1."""
    on_ranks(_compare_logging, 2, Case(partial(clip, max_norm=INFINITY, foreach=foreach), steps=12, dear=SHARDED))


def _compare_logging(case: Case) -> None:
    expected, expected_state, _ = run_arm(case, with_dear=False)
    seen, seen_state, stats = run_arm(case, with_dear=True)
    assert_same(seen_state, expected_state, "at the end")
    for step in expected:
        assert_same(seen[step][0], expected[step][0], f"loss of step {step}")
        assert_same(seen[step][1], expected[step][1], f"norm of step {step}", rtol=1e-6)
    assert stats.fallbacks == {}
    assert stats.deferred_steps == stats.pipelined_iterations


@pytest.mark.parametrize("loop", [clip, partial(clip, foreach=False), scale_loss], ids=["clip", "one_by_one", "scaler"])
@pytest.mark.parametrize("factory", [two_optimizers, ADAMW], ids=["two", "one"])
def test_several_optimizers_and_dtypes(on_ranks, loop, factory) -> None:
    case = Case(loop, model=MixedNet, optimizer=factory, steps=12, dear=SHARDED)
    on_ranks(compare_mixed, 2, case)


def compare_mixed(case: Case) -> None:
    """A bf16 norm has 8 bits, and Adam's first steps turn the sign of a tiny gradient into a step."""
    expected, _, _ = run_arm(case, with_dear=False)
    seen, seen_state, stats = run_arm(case, with_dear=True)
    assert_same(seen, expected, "in the loop", rtol=1e-2, atol=1e-3)
    assert_same_on_all_ranks(seen_state)
    assert stats.fallbacks == {}
    assert sum(stats.looks.values()) <= 1, stats.looks


def test_a_fused_optimizer_that_unscales_by_itself(on_ranks) -> None:
    case = Case(scale_loss, optimizer=optimizer(torch.optim.SGD, lr=0.1, fused=True), steps=12, dear=SHARDED)
    on_ranks(compare_norms, 2, case)


@pytest.mark.parametrize("loop", [clip, scale_loss])
def test_a_wire_of_16_bits(on_ranks, loop) -> None:
    case = Case(loop, optimizer=SGD, steps=12, dear={**SHARDED, "wire_dtype": torch.bfloat16})
    on_ranks(compare_norms, 2, case)


class NetWithIgnored(DeepNet):
    """DDP leaves two parameters alone: each rank trains its own."""

    def __init__(self) -> None:
        super().__init__()
        names = [name for name, _ in self.named_parameters()][2:4]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)


@pytest.mark.parametrize("loop", [clip, scale_loss])
def test_parameters_that_ddp_ignores_count_with_this_ranks_gradient(on_ranks, loop) -> None:
    case = Case(loop, model=NetWithIgnored, optimizer=SGD, steps=12, dear=SHARDED)
    on_ranks(_compare_ignored, 2, case)


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
        norm = clip_grad_norm_(net.parameters(), loops.ACTIVE_NORM, foreach=foreach)
        run.optimizer.step()
        yield loss, norm, [p.grad.clone() for p in net.parameters()] if index % 2 else []


def after_step(run: Run) -> Iterator[Any]:
    """Too late for the update, which must stay as it is; `.grad` is clipped all the same."""
    for loss in backward(run):
        early = clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
        late = clip_grad_norm_(run.model.parameters(), loops.ACTIVE_NORM)
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
        norm = clip_grad_norm_(run.model.parameters(), loops.ACTIVE_NORM)
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
            norm = clip_grad_norm_(run.model.parameters(), loops.ACTIVE_NORM, error_if_nonfinite=True)
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
    assert not any(slot.pending.held_elsewhere() for slot in state._reducer.pipeline.slots)


def kept_on_rank_0(run: Run, set_to_none: bool) -> Iterator[Any]:
    """Rank 0 keeps the memory of all gradients, which DDP's next backward fills: they are plain there."""
    kept: list[torch.Tensor] = []
    for x, y in run.batches():
        run.optimizer.zero_grad(set_to_none)
        loss = run.loss(run.model(x), y)
        loss.backward()
        seen = snapshot(kept)
        norm = clip_grad_norm_(run.model.parameters(), loops.ACTIVE_NORM)
        kept = [p.grad.detach() for p in run.model.parameters()] if run.rank == 0 else []
        run.optimizer.step()
        yield loss, norm, seen, snapshot(kept)


@pytest.mark.parametrize("set_to_none", [False, True], ids=["in_place", "to_none"])
@pytest.mark.parametrize("is_view", [False, True], ids=["copied", "bucket_view"])
def test_gradients_may_be_kept_on_one_rank(on_ranks, is_view, set_to_none) -> None:
    loop = partial(kept_on_rank_0, set_to_none=set_to_none)
    case = Case(loop, model=DeepNet, optimizer=SGD, dear=SHARDED, ddp={"gradient_as_bucket_view": is_view})
    on_ranks(compare_norms, 2, case, 1e-5, False)


def forked_on_rank_0(run: Run) -> Iterator[Any]:
    """Between backward and clipping, which the child must not take part in."""
    for loss in backward(run):
        if run.rank == 0:
            child = os.fork()
            if child == 0:
                clip_grad_norm_(run.model.parameters(), loops.ACTIVE_NORM)
                os._exit(0)
            os.waitpid(child, 0)
        norm = clip_grad_norm_(run.model.parameters(), loops.ACTIVE_NORM)
        run.optimizer.step()
        yield loss, norm


DISTURBED = {
    "two_models": two_models,
    "two_models_one_by_one": partial(two_models, foreach=False),
    "compiled": compiled_optimizers.compiled_clipping,
    "disturbed": disturbed,
    "every_micro_batch": every_micro_batch,
    "forked_on_rank_0": forked_on_rank_0,
    "disturbed_one_by_one": partial(disturbed, foreach=False),
    "after_step": after_step,
    "old_gradients": old_gradients,
    "nan_at_last": nan_at_last,
    "norm_0": partial(clip, norm_type=0.0),
    "smallest": partial(clip, norm_type=-INFINITY),
}


@pytest.mark.parametrize(
    ("name", "world_size"), [(name, (2, 3, 2, 1)[index % 4]) for index, name in enumerate(DISTURBED)]
)
def test_gradients_that_were_used_before_or_are_used_later(on_ranks, name, world_size) -> None:
    model = DeepNet if name == "smallest" else OddNet
    case = Case(DISTURBED[name], model=model, optimizer=SGD, world_size=world_size, steps=10, dear=SHARDED)
    on_ranks(compare_norms, world_size, case, 1e-5, False)


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


def test_ranks_must_agree_on_the_option(on_ranks) -> None:
    assert all("norms" in error for error in on_ranks(_disagree, 2))


def _disagree() -> str:
    import ddp_crossover as dx

    run = Run(Case(dear={"norms": ("exact", "sharded")[dist.get_rank()]}), with_dear=True)
    with pytest.raises(dx.DisagreementError) as caught:
        run.attach()
    return str(caught.value)


def test_an_unknown_kind_of_norm_is_refused(on_ranks) -> None:
    [error] = on_ranks(_refused, 1)
    assert "norms must be one of exact, sharded" in error


def _refused() -> str:
    run = Run(Case(dear={"norms": "fast"}), with_dear=True)
    with pytest.raises(ValueError) as caught:
        run.attach()
    return str(caught.value)
