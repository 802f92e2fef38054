"""Optimizers and steps that are not textbook: shared parameters, arguments, subclasses, coupling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from equivalence import Case, Run, check_case, optimizer, plain_loop
from loops import every_optimizer_steps
from models import DeepNet
from own_optimizers import OwnOptimizer


def _two_over_the_same(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1), SGD(list(model.parameters())[:3], lr=0.05, momentum=0.9)]


def test_two_optimizers_may_share_a_parameter(on_ranks) -> None:
    check_case(Case(every_optimizer_steps, model=DeepNet, optimizer=_two_over_the_same, pipelined=False), on_ranks)


class ScaledSGD(SGD):
    """Takes an argument of its own in `step`."""

    def step(self, closure: Callable[[], Any] | None = None, scale: float = 1.0) -> Any:
        before = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= scale
        try:
            return super().step(closure)
        finally:
            for group, lr in zip(self.param_groups, before, strict=True):
                group["lr"] = lr


def _scaled(model: nn.Module) -> Optimizer:
    return ScaledSGD(model.parameters(), lr=0.1)


def _step_with_an_argument(run: Run) -> Iterator[Any]:
    for index, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        run.optimizer.step(scale=0.5 if index % 2 else 1.5)
        yield loss


def _twice(model: nn.Module) -> list[Optimizer]:
    return [made := SGD(model.parameters(), lr=0.05, momentum=0.9), made]


def test_an_optimizer_that_is_given_twice_steps_once(on_ranks) -> None:
    check_case(Case(optimizer=_twice), on_ranks)


def test_arguments_of_step_reach_the_update(on_ranks) -> None:
    check_case(Case(_step_with_an_argument, model=DeepNet, optimizer=_scaled, pipelined=False), on_ranks)


class DecayAfterwards(SGD):
    """Goes on after `super().step()`, which has hooks of its own once any SGD was made."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.99).sub_(p.grad, alpha=0.01)
        return loss


def _decaying(model: nn.Module) -> Optimizer:
    SGD([torch.zeros(1)], lr=0.1)
    return DecayAfterwards(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
def test_a_subclass_that_works_after_super_step_is_one_step(on_ranks, strict) -> None:
    check_case(Case(model=DeepNet, optimizer=_decaying, strict=strict), on_ranks)


class ClippingSGD(OwnOptimizer):
    """Couples parameters, but only above a threshold on the norm of all gradients."""

    def __init__(self, params: Any, lr: float, max_norm: float) -> None:
        super().__init__(params, lr)
        self.max_norm = max_norm

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        if parameters:
            norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters]))
            factor = min(self.max_norm / (float(norm) + 1e-6), 1.0)
            for p in parameters:
                p.sub_(p.grad, alpha=group["lr"] * factor)


class Wrapper(Optimizer):
    """Steps an optimizer that it holds."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.inner = SGD(params, lr=lr, momentum=0.9)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.inner.step(closure)


class CountingSGD(SGD):
    """Keeps a counter in its param groups, as schedule-free optimizers do: one per step, not per group."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        return super().step(closure)


def _why_waits(make: Callable[[nn.Module], Optimizer]) -> str:
    run = Run(Case(model=DeepNet, optimizer=make), with_dear=True)
    for _ in plain_loop(run):
        pass
    run.detach()
    return "\n".join(run.state.stats().fallbacks)


def _coupled_far_away(model: nn.Module) -> Optimizer:
    return ClippingSGD(model.parameters(), lr=0.1, max_norm=100.0)


def _coupled_asleep(model: nn.Module) -> Optimizer:
    return ClippingSGD(model.parameters(), lr=0.0, max_norm=0.1)


def _wrapped(model: nn.Module) -> Optimizer:
    return Wrapper(model.parameters(), lr=0.1)


def _counting(model: nn.Module) -> Optimizer:
    return CountingSGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (_coupled_far_away, "ClippingSGD"),
        (_coupled_asleep, "ClippingSGD"),
        (_wrapped, "Wrapper"),
    ],
)
def test_coupling_is_found_where_it_hides_and_is_exact(on_ranks, make, name) -> None:
    """Behind a threshold, a learning rate of 0, or an optimizer inside of an optimizer."""
    [reason] = on_ranks(_why_waits, 1, make)
    assert "waits for all gradients" in reason and name in reason, reason
    check_case(Case(model=DeepNet, optimizer=make, pipelined=False), on_ranks)


def test_counters_in_param_groups_are_deferred(on_ranks) -> None:
    assert on_ranks(_why_waits, 1, _counting) == [""]
    check_case(Case(model=DeepNet, optimizer=_counting), on_ranks)


class KeepsGradients(OwnOptimizer):
    """Adds the difference to the last gradient, as optimistic SGD does, and keeps that without a clone."""

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for p in parameters:
            p.add_(2 * p.grad - self.state[p].get("last", p.grad), alpha=-group["lr"])
            self.state[p]["last"] = p.grad.detach()


def _keeps_gradients(model: nn.Module) -> Optimizer:
    return KeepsGradients(model.parameters())


def _some_twice(model: nn.Module) -> Optimizer:
    parameters = list(model.parameters())
    return SGD(parameters + parameters[:2], lr=0.05, momentum=0.9)  # a warning of torch


class ByName(OwnOptimizer):
    """Goes by the names of parameters, if it was given any."""

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        names = group.get("param_names") or [""] * len(parameters)
        for name, p in zip(names, parameters, strict=True):
            p.add_(p.grad, alpha=-group["lr"] * (0.1 if "bias" in name else 1))


def _by_name(model: nn.Module) -> Optimizer:
    return ByName(model.named_parameters())


class ByIds(OwnOptimizer):
    """Goes by numbers of parameters in its param groups, which each rank has of its own."""

    def __init__(self, model: nn.Module) -> None:
        biases = [id(p) for name, p in model.named_parameters() if "bias" in name]
        super().__init__(model.parameters(), biases=biases)

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * (0.1 if id(p) in group["biases"] else 1))

    def state_dict(self) -> dict[str, Any]:
        return {}  # nor has each arm of the comparison the same


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_keeps_gradients, "keeps gradients"),
        (_some_twice, "more than once in its param groups"),
        (_by_name, "goes by the names of parameters"),
        (ByIds, "stores the id() of parameters"),
    ],
)
def test_what_a_later_update_would_not_find_waits_and_is_exact(on_ranks, make, reason: str) -> None:
    [why] = on_ranks(_why_waits, 1, make)
    assert reason in why, why
    check_case(Case(model=DeepNet, optimizer=make, pipelined=False), on_ranks)


def _begins_to_repeat(run: Run) -> Iterator[Any]:
    for index, loss in enumerate(plain_loop(run)):
        if index == 7:
            parameters = run.optimizer.param_groups[0]["params"]
            parameters.append(parameters[0])
        yield loss


def _gives_names(run: Run) -> Iterator[Any]:
    """Between `step()` and the use of what it has updated: from the next one on, biases are slow."""
    for index, loss in enumerate(plain_loop(run)):
        if index == 7:
            group = run.optimizer.param_groups[0]
            group["param_names"] = [name for name, _ in run.model.named_parameters()]
        yield loss


def _by_names_of_later(model: nn.Module) -> Optimizer:
    return ByName(model.parameters())


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(
    ("loop", "make", "reason"),
    [
        (_begins_to_repeat, optimizer(SGD, lr=0.05, momentum=0.9), "a parameter is more than once"),
        (_gives_names, _by_names_of_later, "goes by the names of parameters"),
    ],
    ids=["repeats", "names"],
)
def test_what_is_put_into_a_param_group_in_training_waits_or_is_refused(on_ranks, shard, loop, make, reason) -> None:
    case = Case(loop, DeepNet, make, dear={"shard_optimizer": shard}, pipelined=False)
    if not shard:
        check_case(case, on_ranks)
        return
    on_ranks(_is_refused, 2, case, f"cannot update shards, because .*{reason}")


def _is_refused(case: Case, reason: str) -> None:
    run = Run(case, with_dear=True)
    with pytest.raises(RuntimeError, match=reason):
        list(case.loop(run))
    run.detach()


class Polyak(OwnOptimizer):
    """Steps as far as the loss says that its closure returns, if it has one, and not at all if that is not finite."""

    def update_all(self, loss: Any) -> None:
        if loss is not None and not loss.isfinite():
            return
        for group in self.param_groups:
            for p in group["params"]:
                most = float("inf") if loss is None else 0.01 * float(loss) / float(p.grad.square().sum())
                p.add_(p.grad, alpha=-min(group["lr"], most))


class SkipsNegative(OwnOptimizer):
    """Steps only if the loss is not negative."""

    def update_all(self, loss: Any) -> None:
        if loss is None or not loss < 0:
            super().update_all(loss)


class KeepsLoss(OwnOptimizer):
    """Keeps the loss for a log."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.last = super().step(closure)
        return self.last


def _with_closure(run: Run) -> Iterator[Any]:
    for index, (x, y) in enumerate(run.batches()):

        def closure(index: int = index, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(run.model(x), y)
            loss.backward()
            dist.all_reduce(of_all := loss.detach().clone())
            return of_all * {9: float("nan"), 10: -1, 11: float("inf")}.get(index, 1)

        yield run.optimizer.step(closure)


@pytest.mark.parametrize(("make", "is_deferred"), [(Polyak, False), (SkipsNegative, False), (KeepsLoss, True)])
def test_an_optimizer_that_goes_by_the_loss_of_its_closure_waits(on_ranks, make, is_deferred: bool) -> None:
    check_case(Case(_with_closure, DeepNet, optimizer(make), pipelined=is_deferred), on_ranks)


class DetachesLoss(OwnOptimizer):
    """Returns the loss without its graph."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure().detach()
        super().step()
        return loss


def _adds_a_hook(run: Run) -> Iterator[Any]:
    for index, loss in enumerate(plain_loop(run)):
        if index == 7:
            run.optimizer.register_step_pre_hook(lambda *_: None)
        yield loss


@pytest.mark.parametrize("shard", [False, True])
def test_a_step_without_a_closure_is_given_none_also_behind_a_new_hook(on_ranks, shard: bool) -> None:
    check_case(Case(_adds_a_hook, DeepNet, optimizer(DetachesLoss), dear={"shard_optimizer": shard}), on_ranks)
