"""Habits of other people's optimizers that a glance, or a trial on a small clone, does not show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from adversarial import Script, adversarial
from adversary.nets import fit, mlp, train_step
from own_optimizers import OwnOptimizer

Update = Callable[[Any, dict[str, Any], list[Any]], None]
INDEPENDENT = "does not update each parameter independently"


def _train(run: Script, update: Update, change: Callable[[Any, int], None] = lambda *_: None, **settings: Any) -> Any:
    """Trains three matrices of one shape; ``change`` is called before each step."""
    kind = type("Habit", (OwnOptimizer,), {"update": update})
    square = [module for _ in range(3) for module in (nn.Linear(34, 34), nn.Tanh())]
    model, optimizer = run.train(nn.Sequential(nn.Linear(8, 34), *square, nn.Linear(34, 4)), kind, **settings)
    for step, (x, y) in enumerate(run.batches(14)):
        change(optimizer, step)
        run.log(train_step(model, optimizer, x, y))
    return optimizer


def _plain(group: dict[str, Any], parameters: list[Any], scale: float = 1.0) -> None:
    for p in parameters:
        p.sub_(p.grad, alpha=group["lr"] * scale)


def _clips(self: Any, group: dict[str, Any], parameters: list[Any]) -> None:
    scale = 1.0
    if (
        group["max_norm"] < 1e6
        or group["mode"] == "norm"
        or getattr(self, "norm", 0)
        or self.defaults["mode"] == "norm"
    ):
        scale = 0.1 / float(torch.stack([p.grad.norm() for p in parameters]).norm())
    _plain(group, parameters, scale)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda optimizer: optimizer.param_groups[0].update(max_norm=0.1),
    "string": lambda optimizer: optimizer.param_groups[0].update(mode="norm"),
    "attribute": lambda optimizer: setattr(optimizer, "norm", 0.1),
    "defaults": lambda optimizer: optimizer.defaults.update(mode="norm"),
}


@adversarial(cases={f"{name} {step}": (name, step) for name in CHANGES for step in (0, 9)}, fallback=INDEPENDENT)
def test_clipping_is_switched_on_after_attach(run: Script, case: Any) -> None:
    name, at = case
    _train(run, _clips, lambda optimizer, step: CHANGES[name](optimizer) if step == at else None, max_norm=1e9, mode="")


@adversarial(fallback="draws random numbers")
def test_random_numbers_for_large_parameters_only(run: Script) -> None:
    def draws(self: Any, group: dict[str, Any], parameters: list[Any]) -> None:
        _plain(group, parameters)
        for p in parameters:
            if p.numel() > 1000:
                p.add_(torch.randn_like(p), alpha=1e-3)

    torch.manual_seed(0)
    _train(run, draws)


@adversarial(fallback=INDEPENDENT)
def test_a_step_is_skipped_if_any_gradient_is_not_finite(run: Script) -> None:
    def skips(self: Any, group: dict[str, Any], parameters: list[Any]) -> None:
        if all(p.grad.isfinite().all() for p in parameters):
            _plain(group, parameters)

    net = mlp()
    model, optimizer = run.train(net, type("Habit", (OwnOptimizer,), {"update": skips}))
    for step, (x, y) in enumerate(run.batches(14)):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        if step in (8, 10):
            loss = loss + net[0].bias[0] * float("inf")
        loss.backward()
        optimizer.step()
        run.log([p.sum() for p in net.parameters()])


@adversarial(fallback=INDEPENDENT)
def test_parameters_of_one_shape_are_stacked(run: Script) -> None:
    def stacks(self: Any, group: dict[str, Any], parameters: list[Any]) -> None:
        of_shape: dict[Any, list[Any]] = {}
        for p in parameters:
            of_shape.setdefault(p.shape, []).append(p)
        for alike in of_shape.values():
            grads = torch.stack([p.grad for p in alike])
            grads /= grads.norm() + 1e-8
            for p, g in zip(alike, grads, strict=True):
                p.sub_(g, alpha=group["lr"])

    _train(run, stacks)


@adversarial(fallback="communicates with the other ranks")
def test_ranks_vote_in_a_step_and_one_rank_evaluates(run: Script) -> None:
    def votes(self: Any, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            vote = p.grad.sign()
            dist.all_reduce(vote)
            p.sub_(vote.sign(), alpha=0.01)

    model, optimizer = run.train(mlp(), type("Habit", (OwnOptimizer,), {"update": votes}))
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.module(x)
        dist.barrier()


@adversarial()
def test_hooks_of_the_optimizer_communicate(run: Script) -> None:
    """They run in step(), at the same moment on all ranks, whether updates are deferred or not."""
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    total = torch.zeros(())

    def count(*_: Any) -> None:
        dist.all_reduce(total.add_(1))

    optimizer.register_step_pre_hook(count)
    optimizer.register_step_post_hook(count)
    fit(run, model, optimizer)
    run.log(total)


# What is deferred all the same.


@adversarial()
def test_decay_is_added_to_gradients_and_they_are_logged(run: Script) -> None:
    def decays(self: Any, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.grad.add_(p, alpha=0.1)
        _plain(group, parameters)

    model, optimizer = run.train(mlp(), type("Habit", (OwnOptimizer,), {"update": decays}))
    for step, (x, y) in enumerate(run.batches(14)):
        run.log(train_step(model, optimizer, x, y))
        if step > 10:
            run.log([p.grad.norm() for p in model.parameters()])


@adversarial()
def test_a_number_of_each_parameter_decides_about_it(run: Script) -> None:
    def normalizes(self: Any, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            if (norm := p.grad.norm().item()) > 0:
                p.sub_(p.grad, alpha=group["lr"] / norm)

    _train(run, normalizes)


@adversarial(cases={"number": lambda: 0, "tensor": lambda: torch.zeros(())})
def test_a_counter_in_the_group(run: Script, case: Any) -> None:
    def counts(self: Any, group: dict[str, Any], parameters: list[Any]) -> None:
        group["k"] += 1
        _plain(group, parameters, scale=1 / float(group["k"]))

    _train(run, counts, k=case())


@adversarial()
def test_no_lr_and_a_function(run: Script) -> None:
    def sign(tensor: Any) -> Any:
        return tensor.sign()

    class WithFunction(OwnOptimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=None)
            self.function = sign

        def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
            for p in parameters:
                p.sub_(self.function(p.grad), alpha=0.01)

    fit(run, *run.train(mlp(), WithFunction))


class Projector:
    """Kept in the state, and compared by identity."""

    def __init__(self) -> None:
        self.basis: Any = None

    def project(self, grad: Any) -> Any:
        if self.basis is None:
            self.basis = torch.linspace(0, 1, grad.numel()).view_as(grad)
        return grad * self.basis


@adversarial()
def test_objects_in_the_state(run: Script) -> None:
    def projects(self: Any, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.sub_(self.state[p].setdefault("projector", Projector()).project(p.grad), alpha=group["lr"])

    for state in _train(run, projects).state.values():
        run.log(state.pop("projector").basis)


class TrainsOnly(OwnOptimizer):
    """As schedule-free optimizers: raises unless it was told to train."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, trains=False)

    def train(self) -> None:
        self.param_groups[0]["trains"] = True

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        if not group["trains"]:
            raise RuntimeError("call train()")
        super().update(group, parameters)


@adversarial()
def test_an_optimizer_that_is_told_to_train_after_attach(run: Script) -> None:
    model, optimizer = run.train(mlp(), TrainsOnly)
    optimizer.train()
    fit(run, model, optimizer)


def _marks(graph: Any, inputs: Any) -> Any:
    """A compiler whose results differ from those without it, as those of real ones do in last bits."""
    return lambda *args: tuple(1.5 * each for each in graph(*args))


@torch.compile(backend=_marks)
def _compiled(grad: Any) -> Any:
    return grad * 0.1


@adversarial(deferred=0, fallback="runs compiled functions")
def test_functions_that_are_compiled_stay_so(run: Script) -> None:
    """Torch runs them uncompiled under a dispatch mode, so a watched step would have other bits."""

    def calls(self: Any, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.sub_(_compiled(p.grad))

    _train(run, calls)


class Forwards(Optimizer):
    """Wraps an optimizer, skips ``Optimizer.__init__``, and has all that it lacks from the one inside."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@adversarial(fallback="it wraps another optimizer. Attach that one, its .inner")
def test_a_wrapper_that_forwards_attributes(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = Forwards(SGD(model.parameters(), lr=0.1))
    run.attach(model, optimizer)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


# What begins late, in the middle of a deferred update.


COUNTS = {"late": 0}


@pytest.mark.parametrize("what", ["vote", "draw", "count"])
def test_what_an_update_does_that_was_never_seen_is_an_error_and_no_hang(on_ranks, what: str) -> None:
    for message in on_ranks(_begins_late, 2, what):
        assert "in the steps that were watched" in message and "schedule='allreduce'" in message


def test_and_on_every_rank_if_one_of_them_updates_that_parameter(on_ranks) -> None:
    messages = on_ranks(_begins_late, 2, "draw in one")
    assert sorted("in the steps that were watched" in message for message in messages) == [False, True]
    assert any("has failed on rank" in message for message in messages)


def _begins_late(what: str) -> str:
    import ddp_crossover as dx
    from equivalence import SMALL_GROUPS_MB

    class Late(OwnOptimizer):
        def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
            for p in parameters:
                self.state[p]["steps"] = steps = self.state[p].get("steps", 0) + 1
                if steps == 16 and (what != "draw in one" or p.shape == (9, 10)):
                    if what == "vote":
                        dist.all_reduce(p.grad)
                    elif what == "count":
                        COUNTS["late"] += 1
                    else:
                        p.add_(torch.randn_like(p))
                if what == "draw in one":
                    p.mul_(1 - 0.0 * p.grad.norm())  # so that each parameter has an owner
            super().update(group, parameters)

    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(9, 10), nn.Linear(10, 9)))
    optimizer = Late(ddp.parameters())
    state = dx.attach(ddp, optimizer, fusion_mb=SMALL_GROUPS_MB, shard_optimizer=what == "draw in one")
    try:
        for _ in range(20):
            optimizer.zero_grad()
            ddp(torch.randn(2, 9)).sum().backward()
            optimizer.step()
            if dist.get_rank() == 0:
                with torch.no_grad():
                    ddp.module(torch.ones(1, 9))
    except RuntimeError as error:
        with contextlib.suppress(RuntimeError):  # updates that are left would do the same
            state.detach()
        return str(error)
    return "no error"


# Settings of each parameter, by its place.


class Placed(OwnOptimizer):
    """Has a rate for each parameter."""

    def __init__(self, params: Any, kind: str) -> None:
        params = list(params)
        rates = {index: 0.1 for index in range(len(params))}
        settings = {"list": list(rates.values()), "tuple": tuple(rates.values()), "dict": rates, "few": {}}
        super().__init__(params, **({} if kind.startswith("own") else {"rates": settings[kind]}))
        self.kind = kind.removeprefix("own ")
        self.rates = settings[self.kind] if kind.startswith("own") else None

    def rates_now(self) -> Any:
        return self.param_groups[0]["rates"] if self.rates is None else self.rates

    def set_rate(self, index: int, rate: float) -> None:
        rates = self.rates_now()
        if isinstance(rates, tuple):
            rates = (*rates[:index], rate, *rates[index + 1 :])
            if self.rates is None:
                self.param_groups[0]["rates"] = rates
            else:
                self.rates = rates
        else:
            rates[index] = rate

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        rates = self.rates_now()
        for index, p in enumerate(parameters):
            p.sub_(p.grad, alpha=rates.get(index, 0.1) if isinstance(rates, dict) else rates[index])


@adversarial(
    cases={
        f"{own}{kind} {first}": (own + kind, first)
        for own in ("", "own ")
        for kind in ("list", "tuple", "dict", "few")
        for first in (0, 9)
    },
    fallback="may have an entry for each parameter",
)
def test_each_parameter_has_a_rate_by_its_place(run: Script, case: Any) -> None:
    kind, first = case
    layers = [module for _ in range(4) for module in (nn.Linear(8, 8), nn.Tanh())]
    model, optimizer = run.train(nn.Sequential(*layers, nn.Linear(8, 4)), Placed, kind=kind)
    for step, (x, y) in enumerate(run.batches(14)):
        if step == first:
            optimizer.set_rate(len(list(model.parameters())) - 1, 0.5)
        run.log(train_step(model, optimizer, x, y))
