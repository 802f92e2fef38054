"""What a watched step shows of an optimizer, habit by habit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ddp_crossover.watching.optimizer_snapshot import is_of_torch
from ddp_crossover.watching.separability import judge
from ddp_crossover.watching.step_watch import Communicates, Seen, StepWatch
from optimizers import OPTIMIZERS
from own_optimizers import OwnOptimizer

Update = Callable[[Any, dict[str, Any], list[Tensor]], None]


def _own(update: Update, **defaults: Any) -> Optimizer:
    kind = type("Habit", (OwnOptimizer,), {"update": update})
    torch.manual_seed(0)
    return kind([nn.Parameter(torch.randn(shape)) for shape in ((3, 3), (3, 3), (3,))], **defaults)


def _give_gradients(optimizer: Optimizer, *, in_one_buffer: bool = False) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    buffer = torch.randn(sum(p.numel() for p in parameters))
    pieces = buffer.split([p.numel() for p in parameters])
    for p, piece in zip(parameters, pieces, strict=True):
        p.grad = piece.view_as(p) if in_one_buffer else piece.view_as(p).clone()


def _watched(optimizer: Optimizer, steps: int = 2, counters: tuple[str, ...] = (), **gradients: Any) -> Seen:
    for _ in range(steps):
        _give_gradients(optimizer, **gradients)
        with (watch := StepWatch(optimizer)):
            optimizer.step()
        seen = watch.seen(counters, lambda p: f"<{p.dim()}d>")
        if seen.why_not is not None:
            break
    return seen


def _grads(parameters: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


# Each by itself.


def _momentum(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    for p in parameters:
        buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
        buffer.mul_(0.9).add_(p.grad)
        p.data.view(-1).sub_(buffer.view(-1), alpha=group["lr"])


def _scratch(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    """One buffer serves all parameters in turn."""
    buffer = torch.empty(9)
    for p in parameters:
        part = buffer[: p.numel()].view_as(p)
        if part.numel() == buffer.numel():
            part.copy_(p.grad)
            p.sub_(part, alpha=group["lr"])


def _trust_ratio(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    """Numbers that Python gets decide about their own parameter only."""
    for p in parameters:
        norm = p.grad.norm().item()
        if norm > 0:
            p.sub_(p.grad, alpha=group["lr"] / norm)


def _stacked_norms(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    """Norms travel in one tensor, a row each."""
    grads = _grads(parameters)
    norms = torch.stack(torch._foreach_norm(grads))
    ratios = torch.where(norms > 0, 1 / norms, 1.0).unbind()
    torch._foreach_sub_(parameters, torch._foreach_mul(torch._foreach_mul(grads, ratios), group["lr"]))


def _scaled_rows(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    """Rows are written in place, each by itself."""
    grads = _grads(parameters)
    norms = torch.stack(torch._foreach_norm(grads)).add_(1).unbind()
    torch._foreach_mul_(norms, [0.5, 0.25, 0.125])
    torch._foreach_addcmul_(parameters, grads, norms, value=-0.1)


def _counts_in_state(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    """All counters are read before the first update, but do not depend on data."""
    for p in parameters:
        self.state[p].setdefault("step", torch.zeros(())).add_(1)
    rates = [group["lr"] / self.state[p]["step"].item() for p in parameters]
    for p, rate in zip(parameters, rates, strict=True):
        p.sub_(p.grad, alpha=rate)


def _counts_beside_a_number(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    """The average of a parameter that is a number is no counter, but its counter is one."""
    for p in parameters:
        self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
    _counts_in_state(self, group, parameters)


def _averages_decide(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    for p in parameters:
        self.state[p].setdefault("step", torch.zeros(())).add_(1)
        average = self.state[p].setdefault("average", torch.zeros(()))
        self.state[p].setdefault("copied", torch.zeros(())).copy_(average)  # the last one
        average.lerp_(p.grad.sum(), 0.1)
    rates = [self.state[p]["copied"].item() for p in parameters]
    for p, rate in zip(parameters, rates, strict=True):
        p.sub_(p.grad, alpha=rate)


def test_counters_beside_a_parameter_that_is_a_number() -> None:
    kind = type("Habit", (OwnOptimizer,), {"update": _counts_beside_a_number})
    assert _watched(kind([nn.Parameter(torch.randn(shape)) for shape in ((3,), (), (2,))])).why_not is None


def _counts_in_group(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    group["k"].add_(1)
    for p in parameters:
        p.sub_(p.grad * (group["lr"] / group["k"]))


def _projects_at_random(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    """By random numbers that are the same in each step, from a generator that nobody else has."""
    for p in parameters:
        generator = torch.Generator().manual_seed(self.state[p].setdefault("seed", 7))
        p.sub_(p.grad * torch.randn(p.shape, generator=generator), alpha=group["lr"])


needs_weak_generators = pytest.mark.skipif(
    not torch.Generator.__weakrefoffset__, reason=f"torch {torch.__version__} does not tell whether a generator is gone"
)


def _begins_with_copies(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    for p in parameters:
        average = self.state[p].setdefault("average", copy.deepcopy(p.grad))
        p.sub_(average.lerp_(p.grad, 0.1), alpha=group["lr"])


@pytest.mark.parametrize("in_one_buffer", [False, True], ids=["own memory", "one buffer"])
@pytest.mark.parametrize(
    "update", [pytest.param(_projects_at_random, marks=needs_weak_generators), _begins_with_copies]
)
def test_what_is_made_in_the_step_is_its_own(update: Update, in_one_buffer: bool) -> None:
    assert _watched(_own(update), in_one_buffer=in_one_buffer).why_not is None


@pytest.mark.parametrize("in_one_buffer", [False, True], ids=["own memory", "one buffer"])
@pytest.mark.parametrize("update", [_momentum, _scratch, _trust_ratio, _stacked_norms, _scaled_rows, _counts_in_state])
def test_a_step_of_each_parameter_by_itself(update: Update, in_one_buffer: bool) -> None:
    assert _watched(_own(update), in_one_buffer=in_one_buffer).why_not is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    optimizer = OPTIMIZERS[name](model)
    assert _watched(optimizer).why_not is None
    if is_of_torch(optimizer):  # so nobody looks for what an update writes beside parameters and their state
        assert judge(optimizer).counters == frozenset()


# Across parameters.


def _clips_by_norm(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    norm = torch.stack([g.norm() for g in _grads(parameters)]).norm()
    for p in parameters:
        p.sub_(p.grad / norm, alpha=group["lr"])


def _clips_by_number(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    norm = float(torch.stack([g.norm() for g in _grads(parameters)]).norm())
    for p in parameters:
        p.sub_(p.grad, alpha=group["lr"] / norm)


def _skips_all(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    if all(torch.isfinite(g).all() for g in _grads(parameters)):
        super(type(self), self).update(group, parameters)


def _skips_by_list(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    if all(max(g.view(-1).tolist()) < 1e9 for g in _grads(parameters)):
        super(type(self), self).update(group, parameters)


def _skips_by_count(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    """The number of elements that are not zero is a size of a tensor."""
    if all(len(g.nonzero()) for g in _grads(parameters)):
        super(type(self), self).update(group, parameters)


def _stacks(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    grads = torch.stack([p.grad for p in parameters if p.dim() == 2])
    grads = grads @ grads.transpose(1, 2) @ grads
    for p, g in zip(parameters[:2], grads, strict=True):
        p.sub_(g / grads.norm(), alpha=group["lr"])


def _mixes_lists(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    torch._foreach_sub_(parameters[:2], [parameters[1].grad, parameters[0].grad])


def _mixes_state(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    for p in parameters:
        self.state[p]["of another"] = parameters[0].grad.sum() * 1
        p.sub_(p.grad, alpha=group["lr"])


def _mixes_rows(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    norms = torch.stack(torch._foreach_norm(_grads(parameters)))
    norms[1:2].mul_(norms[0])
    torch._foreach_mul_(parameters, norms.unbind())


def _mixes_bytes(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    whole = (parameters[0].grad * 1).view(torch.int8)
    parameters[1].sub_(whole.view(-1)[20:24].sum())


def _mixes_copies(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    first, _, last = copy.deepcopy(_grads(parameters))
    parameters[2].sub_(first.sum() + last)


@pytest.mark.parametrize(
    "update",
    [
        *(
            _mixes_rows,
            _mixes_bytes,
            _mixes_copies,
            _clips_by_norm,
            _clips_by_number,
            _skips_all,
            _skips_by_list,
            _skips_by_count,
        ),
        *(_stacks, _mixes_lists, _mixes_state, _averages_decide),
    ],
)
@pytest.mark.parametrize("in_one_buffer", [False, True], ids=["own memory", "one buffer"])
def test_data_of_one_parameter_that_decides_about_another(update: Update, in_one_buffer: bool) -> None:
    assert "does not update each parameter independently" in (
        _watched(_own(update), in_one_buffer=in_one_buffer)[0] or ""
    )


def test_the_parameters_are_named() -> None:
    def mixes(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
        parameters[2].sub_(parameters[0].grad.sum())

    assert "data of <2d> decides about <1d> (aten.sub_.Tensor)" in (_watched(_own(mixes)).why_not or "")


# What else it does.


def _keeps_what_is_no_parameters(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    self.state["all"].setdefault("steps", torch.zeros(())).add_(1)


_OUTSIDE = torch.zeros(2)


def _writes_elsewhere(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    _OUTSIDE.add_(1)


def _gives_other_memory(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    for p in parameters:
        p.data = p.data - p.grad


def _drops_gradients(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    for p in parameters:
        p.grad = None


def _draws_from_one_that_stays(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    generator = group.setdefault("generator", torch.Generator())
    for p in parameters:
        p.add_(torch.randn(p.shape, generator=generator))


OTHERS: dict[str, Update] = {
    "draws random numbers (aten.randn.generator": _draws_from_one_that_stays,
    "draws random numbers (aten.randn_like": lambda self, group, own: [p.add_(torch.randn_like(p)) for p in own],  # type: ignore[dict-item,return-value,misc]
    "draws random numbers, ": lambda self, group, own: [p.add_(random.random()) for p in own],  # type: ignore[dict-item,return-value,misc]
    "draws random numbers,": lambda self, group, own: [p.add_(np.random.rand()) for p in own],  # type: ignore[dict-item,return-value,misc]
    "writes to its state under 'all'": _keeps_what_is_no_parameters,
    "writes to memory that is no parameter's": _writes_elsewhere,
    "writes to 'k' in a param group": _counts_in_group,
    "gives parameters other memory": _gives_other_memory,
    "replaces or drops gradients": _drops_gradients,
    "uses memory by Tensor.numpy()": lambda self, group, own: [p.grad.numpy() for p in own],  # type: ignore[dict-item,return-value,misc]
    "uses memory by Tensor.data_ptr()": lambda self, group, own: [p.data_ptr() for p in own],  # type: ignore[dict-item,return-value,misc]
}


@pytest.mark.quick
@pytest.mark.parametrize("reason", OTHERS)
def test_each_reason_has_its_name(reason: str) -> None:
    assert reason in (_watched(_own(OTHERS[reason], k=torch.zeros(()))).why_not or "")


def test_what_is_a_counter_may_be_written_to() -> None:
    assert _watched(_own(_counts_in_group, k=torch.zeros(())), counters=("k",)).why_not is None


def test_but_not_with_data() -> None:
    def sums(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            p.sub_(p.grad, alpha=group["lr"])
            group["k"].add_(p.grad.norm())

    why_not = _watched(_own(sums, k=torch.zeros(())), counters=("k",)).why_not
    assert "writes to 'k' in a param group, with data of a parameter" in (why_not or "")


def test_edits_of_gradients_are_seen() -> None:
    def decays(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            p.sub_(p.grad.add_(p, alpha=0.1), alpha=group["lr"])

    assert _watched(_own(decays)) == Seen(None, edits_gradients=True, beyond_elements=None, communicates=None)
    assert not _watched(_own(_momentum)).edits_gradients


def _angles(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    for p in parameters:
        p.sub_(torch.atan2(p.grad, p.grad.square() ** 0.5), alpha=group["lr"])


def _powers(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    torch._foreach_add_(parameters, torch._foreach_pow([p.grad for p in parameters], 1.5), alpha=group["lr"])


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (_trust_ratio, "aten.linalg_vector_norm.default"),
        (_momentum, None),
        (_angles, "aten.atan2.default, which rounds an element by its place"),
        (_powers, "aten._foreach_pow.Scalar, which rounds an element by its place"),
    ],
)
def test_whether_it_looks_at_more_than_one_element(update: Update, expected: str | None) -> None:
    assert _watched(_own(update)).beyond_elements == expected


def _votes(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    for p in parameters:
        vote = p.grad.sign()
        dist.all_reduce(vote)
        p.sub_(vote, alpha=group["lr"])


def _averages_at_once(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.broadcast(flat, 0, async_op=True).wait()


def _gathers(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    dist.all_gather_object([None] * dist.get_world_size(), len(parameters))


def _by_functions(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    from torch.distributed import _functional_collectives as functional

    functional.all_reduce(parameters[0].grad, "sum", dist.group.WORLD).add(1)


def _coalesced(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    with dist._coalescing_manager():
        for p in parameters:
            dist.all_reduce(p.grad)


def _waits_for_others(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
    dist.barrier()


COMMUNICATE = (_votes, _averages_at_once, _gathers, _by_functions, _coalesced, _waits_for_others)


def _every_way_to_communicate() -> list[str]:
    reasons = []
    for update in COMMUNICATE:
        optimizer = _own(update)
        _give_gradients(optimizer)
        with pytest.raises(Communicates), StepWatch(optimizer, may_communicate=False):
            optimizer.step()
        reasons.append(_watched(_own(update)).why_not or f"{update.__name__}: nothing")
    return reasons


def test_all_ways_to_communicate_are_seen(on_ranks) -> None:
    for reasons in on_ranks(_every_way_to_communicate, 2):
        assert all("communicates with the other ranks" in reason for reason in reasons), reasons


# The watch itself.


def test_a_closure_is_out_of_sight() -> None:
    optimizer = _own(_momentum)

    def closure() -> None:
        _give_gradients(optimizer)
        optimizer.param_groups[0]["params"][0].grad.add_(torch.randn(()))

    for _ in range(2):
        with (watch := StepWatch(optimizer)):
            optimizer.step(watch.around(closure))
        assert watch.seen(()).why_not is None


def _depths() -> tuple[int, int]:
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def test_nothing_is_left_of_a_step_that_raised() -> None:
    def raises(self: Any, group: dict[str, Any], parameters: list[Tensor]) -> None:
        raise ArithmeticError

    optimizer = _own(raises)
    _give_gradients(optimizer)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        watch = StepWatch(optimizer)
        watch.start()
        return watch.until_freed(args), kwargs

    optimizer.register_step_pre_hook(before)
    with pytest.raises(ArithmeticError) as raised:
        optimizer.step()
    del raised
    assert _depths() == (0, 0)


def test_a_watched_step_has_the_bits_of_a_plain_one() -> None:
    seen = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            _give_gradients(optimizer)
            watch = StepWatch(optimizer)
            if is_watched:
                watch.start()
            optimizer.step()
            watch.stop()
        seen.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *seen))
