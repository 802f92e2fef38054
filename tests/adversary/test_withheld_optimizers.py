"""Optimizers of torch and of people's own, and edits of their settings at odd moments: the second half."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from adversary.nets import mlp, mse, train_step
from adversary.script import Script, adversarial


@adversarial(three=True)
def test_every_layer_has_an_optimizer_of_another_class(run: Script) -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))
    model = run.ddp(net)
    classes = (Adadelta, Adagrad, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, Adafactor)
    optimizers = [cls(layer.parameters(), lr=0.01) for cls, layer in zip(classes, net, strict=True)]
    run.attach(model, *optimizers)
    for x, y in run.batches(outputs=8):
        model.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        run.log(loss)


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


class Trust(Optimizer):
    """LARS over the whole model: one trust ratio from the norms of all parameters and gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        weights = torch.stack([p.norm() for p in params]).norm()
        gradients = torch.stack([p.grad.norm() for p in params]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * weights / (gradients + 1e-6)))
        return loss


@adversarial(deferred=0, fallback="")
def test_one_trust_ratio_couples_all_parameters(run: Script) -> None:
    model, optimizer = run.train(mlp(), Trust, lr=0.02)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)


class Late(Optimizer):
    """Couples parameters only after a number of steps, so that a look at the first ones shows nothing."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "done": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            group["done"] += 1
            scale = 1.0
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * scale)
                if group["done"] > 6:
                    scale = 1.0 / (1.0 + float(p.abs().mean()))
        return loss


@adversarial(deferred=0, fallback="")
def test_optimizer_that_begins_to_couple_parameters_late(run: Script) -> None:
    model, optimizer = run.train(mlp(), Late, lr=0.1)
    for x, y in run.batches(14):
        train_step(model, optimizer, x, y)


class Alternating(Optimizer):
    """Updates even parameters in even steps, odd ones in odd steps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.turn = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if index % 2 == self.turn % 2:
                    p.sub_(p.grad, alpha=group["lr"])
        self.turn += 1
        return loss


@adversarial(deferred=0, fallback="")
def test_optimizer_that_goes_by_the_place_of_a_parameter(run: Script) -> None:
    model, optimizer = run.train(mlp(), Alternating, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)


class RandomMask(Optimizer):
    """Drops updates by a coin of Python's generator."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        import random

        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and random.random() < 0.7:
                    p.sub_(p.grad, alpha=group["lr"])
        return loss


@adversarial(deferred=0, fallback="")
def test_optimizer_that_tosses_a_coin_for_each_parameter(run: Script) -> None:
    import random

    model, optimizer = run.train(mlp(), RandomMask, lr=0.1)
    random.seed(9)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log(random.random())


@adversarial()
def test_params_of_a_group_are_replaced_by_a_shorter_list(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, AdamW, lr=0.03)
    for step, (x, y) in enumerate(run.batches(12)):
        train_step(model, optimizer, x, y)
        if step == 5:
            optimizer.param_groups[0]["params"] = [p for p in net.parameters() if p is not net[0].weight]
            optimizer.state.pop(net[0].weight)


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
def test_deepcopy_of_the_optimizer_every_third_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 3 == 1:
            run.log(copy.deepcopy(optimizer.state_dict()))


@adversarial()
def test_load_state_dict_of_the_optimizer_right_after_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    kept = None
    for step, (x, y) in enumerate(run.batches(12)):
        train_step(model, optimizer, x, y)
        if step == 5:
            kept = copy.deepcopy(optimizer.state_dict())
        if step == 9:
            optimizer.load_state_dict(kept)


@adversarial()
def test_step_without_any_gradient_now_and_then(run: Script) -> None:
    model, optimizer = run.train(mlp(), AdamW, lr=0.03, weight_decay=0.1)
    optimizer.step()
    for step, (x, y) in enumerate(run.batches(12)):
        train_step(model, optimizer, x, y)
        if step % 3 == 2:
            optimizer.zero_grad()
            optimizer.step()


@adversarial()
def test_maximize_is_toggled_and_eps_changes(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.01)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        optimizer.param_groups[0]["maximize"] = step % 3 == 0
        optimizer.param_groups[0]["eps"] = 10.0 ** -(step + 3)


@adversarial()
def test_amsgrad_is_switched_on_in_mid_run(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches(12)):
        if step == 6:
            optimizer.param_groups[0]["amsgrad"] = True
            for p in model.parameters():
                optimizer.state[p]["max_exp_avg_sq"] = torch.zeros_like(p)
        train_step(model, optimizer, x, y)


@adversarial(deferred=0, fallback="")
def test_zero_redundancy_optimizer(run: Script) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = run.ddp(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam, lr=0.03)
    run.attach(model, optimizer)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        run.log(loss)
    optimizer.consolidate_state_dict(0)
    optimizer.state_dict = lambda: {}  # only rank 0 has one


@adversarial()
def test_optimizer_hooks_of_all_kinds(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda _, d: d | {"extra": len(calls)})
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step == 6:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run.log(calls)
