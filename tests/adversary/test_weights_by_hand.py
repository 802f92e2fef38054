"""Scripts that write to weights themselves: clipping, decay, projections, outer optimizers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from adversary.nets import mlp, mse
from adversary.script import ALIASED, Script, adversarial


@adversarial(three=True)
def test_wgan_weight_clipping_before_each_step_of_the_critic(run: Script) -> None:
    critic, optimizer = run.train(mlp(outputs=1), RMSprop, lr=0.01)
    for x, _ in run.batches():
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        optimizer.zero_grad()
        loss = critic(x).mean() - critic(x.flip(1)).mean()
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_clamp_from_param_groups_in_a_step_post_hook(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.05)

    def clamp(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.25, 0.25)

    optimizer.register_step_post_hook(clamp)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_decoupled_decay_in_a_step_pre_hook(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.05)

    def decay(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim > 1:
                    p.data.mul_(1 - group["lr"] * 0.1)

    optimizer.register_step_pre_hook(decay)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()


@adversarial()
def test_max_norm_constraint_by_renorm_on_one_layer(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.3)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            weight = model.module[2].weight
            norm = weight.norm(dim=0, keepdim=True)
            weight *= norm.clamp(max=0.7) / norm


@adversarial()
def test_weights_on_the_sphere_after_every_step(run: Script) -> None:
    """As nGPT does it: all matrices are normalized along one dimension."""
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    matrices = [p for p in net.parameters() if p.ndim == 2]
    for x, y in run.batches():
        mse(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in matrices:
            p.data.copy_(nn.functional.normalize(p.data, dim=1))


class Lookahead(torch.optim.Optimizer):
    """The wrapper of many repositories: it shares param_groups with the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state: Any = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for fast in group["params"]:
                    state = self.state[fast]
                    if "slow" not in state:
                        state["slow"] = fast.data.clone()
                    state["slow"] += (fast.data - state["slow"]) * self.alpha
                    fast.data.copy_(state["slow"])
            group["counter"] = (group["counter"] + 1) % self.k
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()


@adversarial(three=True)
def test_lookahead_around_the_attached_optimizer(run: Script) -> None:
    model, inner = run.train(mlp(), Adam, lr=0.05)
    optimizer = Lookahead(inner)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial(fallback=".")
def test_lookahead_attached_itself(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = Lookahead(Adam(model.parameters(), lr=0.05))
    run.attach(model, optimizer)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        run.log(loss)


class SAM(torch.optim.Optimizer):
    """The implementation of davda54/sam: `first_step` and `second_step` around a base optimizer."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, adaptive: bool = False, **kwargs: Any) -> None:
        super().__init__(params, dict(rho=rho, adaptive=adaptive, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_((p.pow(2) if group["adaptive"] else 1.0) * p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _grad_norm(self) -> torch.Tensor:
        return torch.norm(
            torch.stack(
                [
                    ((p.abs() if group["adaptive"] else 1.0) * p.grad).norm(p=2)
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            ),
            p=2,
        )


@adversarial(three=True, fallback=ALIASED)
def test_sam_in_two_steps_with_the_base_optimizer_attached(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = SAM(model.parameters(), SGD, lr=0.1, momentum=0.9)
    run.attach(model, optimizer.base_optimizer)
    for x, y in run.batches():
        loss = mse(model(x), y)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        mse(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
        run.log(loss)


@adversarial(fallback="wrap|couple|closure|.")
def test_adaptive_sam_attached_itself_with_a_closure(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = SAM(model.parameters(), AdamW, lr=0.02, rho=0.5, adaptive=True)
    run.attach(model, optimizer)
    for x, y in run.batches():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            loss = mse(model(x), y)
            loss.backward()
            return loss

        run.log(closure())
        optimizer.step(closure)
        optimizer.zero_grad()


@adversarial()
def test_manual_sgd_for_the_parameters_that_no_optimizer_has(run: Script) -> None:
    net = mlp()
    model = run.ddp(net)
    own = list(net[2].parameters())
    optimizer = Adam([*net[0].parameters(), *net[4].parameters()], lr=0.03)
    run.attach(model, optimizer)
    for x, y in run.batches():
        model.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for p in own:
                p -= 0.1 * p.grad


@adversarial()
def test_vector_to_parameters_with_noise_every_third_step(run: Script) -> None:
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        if step % 3 == 2:
            flat = parameters_to_vector(model.parameters())
            run.log(flat)
            noise = torch.randn(flat.shape, generator=torch.Generator().manual_seed(step))
            vector_to_parameters(flat + 0.01 * noise, model.parameters())
