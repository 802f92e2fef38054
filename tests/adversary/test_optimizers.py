"""Optimizers of torch and of people's own, and edits of their settings at odd moments."""

from __future__ import annotations

import copy
import types
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
def test_learning_rate_becomes_a_tensor_in_mid_run(run: Script) -> None:
    model, optimizer = run.train(mlp(), AdamW, lr=0.05)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step == 6:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
        if step > 6:
            optimizer.param_groups[0]["lr"].fill_(0.02 / step)


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


class GroupCountingAdam(Optimizer):
    """Keeps its step in the param group, as many published optimizers do."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 1 - b1)
                state["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                rate = group["lr"] * (1 - b2 ** group["step"]) ** 0.5 / (1 - b1 ** group["step"])
                p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-rate)
        return loss


@adversarial(deferred=0, fallback="")
def test_optimizer_counts_its_steps_in_the_param_group(run: Script) -> None:
    model, optimizer = run.train(mlp(), GroupCountingAdam, lr=0.02)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log(optimizer.param_groups[0]["step"])


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
def test_optimizer_whose_step_takes_more_arguments(run: Script) -> None:
    class Scaled(SGD):
        def step(self, closure: Any = None, scale: float = 1.0) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(scale)
            return super().step(closure)

    model, optimizer = run.train(mlp(), Scaled, lr=0.1)
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step(scale=1.0 / (1 + step))


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


@adversarial()
def test_two_optimizers_over_the_same_parameters_take_turns(run: Script) -> None:
    model = run.ddp(mlp())
    first, second = Adam(model.parameters(), lr=0.02), SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.attach(model, first, second)
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, (first, second)[step % 2], x, y))


@adversarial(fallback="")
def test_muon_for_matrices_and_adamw_for_the_rest(run: Script) -> None:
    """Muon as its repository has it, Newton-Schulz in bf16."""

    def zeropower(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
        a, b, c = 3.4445, -4.7750, 2.0315
        x = g.bfloat16()
        if g.size(-2) > g.size(-1):
            x = x.mT
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(steps):
            s = x @ x.mT
            x = a * x + (b * s + c * s @ s) @ x
        return x.mT if g.size(-2) > g.size(-1) else x

    class Muon(Optimizer):
        def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
            super().__init__(params, {"lr": lr, "momentum": momentum})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = torch.enable_grad()(closure)() if closure else None
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                    state = self.state[p]
                    if len(state) == 0:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    buffer = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                    update = zeropower(p.grad.lerp_(buffer, group["momentum"]))
                    p.mul_(1 - group["lr"] * 0.01)
                    p.add_(update.to(p.dtype), alpha=-group["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5)
            return loss

    net = mlp()
    model = run.ddp(net)
    muon = Muon([p for p in net.parameters() if p.ndim == 2])
    adam = AdamW([p for p in net.parameters() if p.ndim < 2], lr=0.01)
    run.attach(model, muon, adam)
    for x, y in run.batches():
        loss = mse(model(x), y)
        loss.backward()
        muon.step()
        adam.step()
        model.zero_grad()
        run.log(loss)


# On 3 ranks plain DDP, to which the script returns, adds up in another order than the reference.
@adversarial(three=False)
def test_switch_from_adam_to_sgd_by_detaching(run: Script) -> None:
    """SWATS by hand: the second half trains with another optimizer, attached anew."""
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches(16)):
        if step == 8:
            run.detach()
            optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        train_step(model, optimizer, x, y)
        run.log([p.sum() for p in model.parameters()])


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
    for x, y in run.batches():
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
def test_deepcopy_of_the_optimizer_every_third_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 3 == 1:
            run.log(copy.deepcopy(optimizer.state_dict()))


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
