"""Optimizers of torch and of people's own, and edits of their settings at odd moments."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import nn
from torch.optim import (
    SGD,
    Adam,
    AdamW,
    Optimizer,
    lr_scheduler,
)

from adversarial import Script, adversarial
from adversary.nets import mlp, mse, train_step


@adversarial(three=True)
def test_learning_rate_is_a_tensor_that_is_changed_in_place_after_step(run: Script) -> None:
    rate = torch.tensor(0.1)
    model, optimizer = run.train(mlp(), SGD, lr=rate)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        rate.mul_(0.8)


@adversarial()
def test_betas_are_a_list_that_is_edited_after_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.05)
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        optimizer.param_groups[0]["betas"][0] *= 0.9


class CountingSGD(Optimizer):
    """Its warm-up counts on the instance, as beginners write it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.steps_done = 0
        self.boost = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        self.steps_done += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.boost * min(1.0, self.steps_done / 6))
        return loss


@adversarial(deferred=0, fallback="", three=True)
def test_optimizer_counts_its_steps_on_the_instance(run: Script) -> None:
    model, optimizer = run.train(mlp(), CountingSGD, lr=0.3)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step == 6:
            optimizer.boost = 0.5
    run.log(optimizer.steps_done)


class SGLD(Optimizer):
    """Stochastic gradient Langevin dynamics: noise from torch's generator in each step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
                    p.add_(torch.randn_like(p), alpha=0.01)
        return loss


@adversarial(deferred=0, fallback="")
def test_langevin_noise_in_step_and_dropout_in_forward(run: Script) -> None:
    net = nn.Sequential(
        nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 4)
    )
    model, optimizer = run.train(net, SGLD, lr=0.1)
    torch.manual_seed(3)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial(deferred=0, fallback="")
def test_step_of_the_instance_is_replaced(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    original = optimizer.step

    def signed(self: Any, closure: Any = None) -> Any:
        for p in model.parameters():
            p.grad.sign_().mul_(0.05)
        return original(closure)

    optimizer.step = types.MethodType(signed, optimizer)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


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
def test_state_of_the_optimizer_is_edited_and_cleared(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches(12)):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            for state in optimizer.state.values():
                state["exp_avg"].mul_(0.1)
        if step == 9:
            optimizer.state.clear()


class Deaf(Optimizer):
    """Takes a closure and never calls it, as many a homemade optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


@adversarial(fallback="does not call the closure exactly once")
def test_optimizer_that_never_calls_its_closure(run: Script) -> None:
    model, optimizer = run.train(mlp(), Deaf, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)


@adversarial(fallback="")
def test_optimizer_that_takes_no_closure_at_all(run: Script) -> None:
    class Bare(Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        def step(self) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.data -= group["lr"] * p.grad.data

    model, optimizer = run.train(mlp(), Bare, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)


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


@adversarial()
def test_params_of_a_group_are_replaced_by_a_shorter_list(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, AdamW, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
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
def test_step_without_any_gradient_now_and_then(run: Script) -> None:
    model, optimizer = run.train(mlp(), AdamW, lr=0.03, weight_decay=0.1)
    optimizer.step()
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 3 == 2:
            optimizer.zero_grad()
            optimizer.step()


@adversarial()
def test_amsgrad_is_switched_on_in_mid_run(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches()):
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


@adversarial()
def test_scheduler_steps_before_the_optimizer(run: Script) -> None:
    """The old order, of which torch warns."""
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    for x, y in run.batches():
        scheduler.step()
        train_step(model, optimizer, x, y)


@adversarial()
def test_warmup_of_a_fresh_optimizer_after_each_cycle(run: Script) -> None:
    """Warm restarts that forget the state of the optimizer."""
    from collections import defaultdict

    model, optimizer = run.train(mlp(), Adam, lr=0.05)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        scheduler.step()
        if step % 4 == 3:
            optimizer.state = defaultdict(dict)


@adversarial()
def test_rate_is_written_before_backward_and_restored_after_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for step, (x, y) in enumerate(run.batches()):
        for group in optimizer.param_groups:
            group["lr"] = 0.2 / (step + 1)
        train_step(model, optimizer, x, y)
        for group in optimizer.param_groups:
            group["lr"] = 1e6


@adversarial()
def test_batch_size_dependent_rate_in_a_step_pre_hook(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    size = [1]
    optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=0.01 * size[0]))
    optimizer.register_step_post_hook(lambda o, *_: o.param_groups[0].update(lr=123.0))
    for step, (x, y) in enumerate(run.batches()):
        size[0] = step + 1
        train_step(model, optimizer, x, y)
