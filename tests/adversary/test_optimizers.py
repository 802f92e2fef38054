"""Optimizers of torch and of people's own, and edits of their settings at odd moments."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from adversarial import Script, adversarial
from adversary.nets import fit, mlp, mse, train_step

# Optimizers of people's own.


@adversarial(deferred=0, fallback="")
def test_step_of_the_instance_is_replaced(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    original = optimizer.step

    def signed(self: Any, closure: Any = None) -> Any:
        for p in model.parameters():
            p.grad.sign_().mul_(0.05)
        return original(closure)

    optimizer.step = types.MethodType(signed, optimizer)
    fit(run, model, optimizer)


class Bare(Optimizer):
    """Takes no closure at all."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data -= group["lr"] * p.grad.data


class Deaf(Bare):
    """Takes a closure and never calls it, as many a homemade optimizer."""

    def step(self, closure: Any = None) -> None:
        super().step()


class Alternating(Bare):
    """Updates even parameters in even steps, odd ones in odd steps: goes by the place of a parameter, and counts."""

    turn = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for p in group["params"][self.turn % 2 :: 2]:
                p.sub_(p.grad, alpha=group["lr"])
        self.turn += 1
        return loss


@adversarial(cases={kind.__name__: kind for kind in (Bare, Alternating)}, fallback="")
def test_optimizers_that_cannot_wait(run: Script, case: Any) -> None:
    fit(run, *run.train(mlp(), case, lr=0.1))


@adversarial()
def test_optimizer_that_never_calls_its_closure(run: Script) -> None:
    fit(run, *run.train(mlp(), Deaf, lr=0.1))


class Wrapped(Optimizer):
    """Shares groups and state with the optimizer that it steps, and goes on after it."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state

    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.999)
        return result


@adversarial(fallback="")
def test_wrapper_that_shares_groups_and_state_is_attached(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = Wrapped(Adam(model.parameters(), lr=0.05))
    run.attach(model, optimizer)
    fit(run, model, optimizer)


@adversarial(deferred=0, fallback="")
def test_zero_redundancy_optimizer(run: Script) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = run.ddp(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam, lr=0.03)
    run.attach(model, optimizer)
    fit(run, model, optimizer)
    optimizer.consolidate_state_dict(0)
    optimizer.state_dict = lambda: {}  # only rank 0 has one


# Groups and their settings.


@adversarial(three=True)
def test_param_group_is_added_in_mid_run_and_evaluated_in_inference_mode(run: Script) -> None:
    """The state of the new group begins while the evaluation runs, if its update waits until then."""
    net = mlp()
    model = run.ddp(net)
    optimizer = Adam(list(net[0].parameters()) + list(net[2].parameters()), lr=0.03)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches()):
        if step == 6:
            optimizer.add_param_group({"params": list(net[4].parameters()), "lr": 0.1})
        train_step(model, optimizer, x, y)
        with torch.inference_mode():
            run.log(net(x))
        model.zero_grad()


@adversarial()
def test_second_param_group_is_popped_and_put_back(run: Script) -> None:
    net = mlp()
    model = run.ddp(net)
    optimizer = Adam(
        [{"params": net[0].parameters()}, {"params": [*net[2].parameters(), *net[4].parameters()]}], lr=0.03
    )
    run.attach(model, optimizer)
    kept = None
    for step, (x, y) in enumerate(run.batches(14)):
        train_step(model, optimizer, x, y)
        if step == 6:
            kept = optimizer.param_groups.pop()
        if step == 9:
            optimizer.param_groups.append(kept)


@adversarial()
def test_capturable_like_tensor_lr_is_shared_by_two_optimizers(run: Script) -> None:
    rate = torch.tensor(0.05)
    net = mlp()
    model = run.ddp(net)
    one, two = SGD(net[0].parameters(), lr=rate), Adam([*net[2].parameters(), *net[4].parameters()], lr=rate)
    run.attach(model, one, two)
    for x, y in run.batches():
        model.zero_grad()
        mse(model(x), y).backward()
        one.step()
        rate.mul_(0.5)
        two.step()
        rate.mul_(1.9)


@adversarial()
def test_step_without_any_gradient_now_and_then(run: Script) -> None:
    model, optimizer = run.train(mlp(), AdamW, lr=0.03, weight_decay=0.1)
    optimizer.step()
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 3 == 2:
            optimizer.zero_grad()
            optimizer.step()


# Hooks.


@adversarial()
def test_optimizer_hooks_of_all_kinds(run: Script) -> None:
    """Those around a step write the rate: the step has that of the first, not of the last."""
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    calls: list[str] = []

    def called(name: str, **settings: float) -> Any:
        def hook(optimizer: Any, *_: Any) -> None:
            calls.append(name)
            optimizer.param_groups[0].update(settings)

        return hook

    optimizer.register_step_pre_hook(called("pre", lr=0.01))
    optimizer.register_step_post_hook(called("post", lr=123.0))
    optimizer.register_state_dict_post_hook(lambda _, d: d | {"extra": len(calls)})
    optimizer.register_load_state_dict_pre_hook(called("load"))
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step == 6:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run.log(calls)


def _momenta(state: Any) -> list[torch.Tensor]:
    return [each["momentum_buffer"].clone() for each in state.values()]


@adversarial(deferred=0, fallback="refers to its state")
def test_state_that_something_else_refers_to(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = optimizer.state  # as in a wrapper
    run.attach(model, optimizer)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y), _momenta(state))


@adversarial(deferred=2, fallback="", three=False)
def test_state_that_something_refers_to_later(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.05, momentum=0.9)
    state: Any = {}
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y), _momenta(state))
        if step == 3:
            state = optimizer.state
        elif step == 4:
            run.detach()
            run.attach(model, optimizer)


@adversarial()
def test_decoupled_decay_in_a_step_pre_hook(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.05)

    def decay(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim > 1:
                    p.data.mul_(1 - group["lr"] * 0.1)

    optimizer.register_step_pre_hook(decay)
    fit(run, model, optimizer)


@adversarial()
def test_exception_in_a_step_post_hook(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    count = 0

    def check(*_: object) -> None:
        nonlocal count
        count += 1
        if count % 4 == 0:
            raise StopIteration("tell somebody")

    optimizer.register_step_post_hook(check)
    for x, y in run.batches(14):
        try:
            train_step(model, optimizer, x, y)
        except StopIteration:
            run.log([p.sum() for p in model.parameters()])


@adversarial()
def test_numbers_of_steps_that_a_converted_checkpoint_has(run: Script) -> None:
    """Whole numbers: torch's loop takes them, foreach does not."""
    model, optimizer = run.train(mlp(), AdamW, lr=0.01)
    for step, (x, y) in enumerate(run.batches(14)):
        if step == 4:
            checkpoint = copy.deepcopy(optimizer.state_dict())
            for state in checkpoint["state"].values():
                state["step"] = state["step"].long()
            optimizer.load_state_dict(checkpoint)
        run.log(train_step(model, optimizer, x, y))


class UsedInAnotherOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(16, 4), nn.Linear(16, 16), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


@adversarial(fallback="share a part of its state")
def test_one_number_of_steps_for_all_parameters(run: Script) -> None:
    """Torch's loop counts it once for each parameter, in the order of the param group."""
    model, optimizer = run.train(UsedInAnotherOrder(), AdamW, lr=0.01)
    for step, (x, y) in enumerate(run.batches(14)):
        if step == 4:
            checkpoint, count = copy.deepcopy(optimizer.state_dict()), torch.tensor(50.0)
            for state in checkpoint["state"].values():
                state["step"] = count
            optimizer.load_state_dict(checkpoint)
        run.log(train_step(model, optimizer, x, y))
