"""Scripts that write to weights themselves, or through outer optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Adam, AdamW

from adversarial import Script, adversarial
from adversary.nets import mlp, mse, train_step


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
def test_out_arguments_write_into_parameters(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with torch.no_grad():
            torch.clamp(net[0].weight, -0.3, 0.3, out=net[0].weight.data)
            torch.mul(net[2].bias.data, 0.5, out=net[2].bias.data)
            torch.sub(net[4].weight.detach(), 0.001, out=net[4].weight.detach())


class Wrapped(torch.optim.Optimizer):
    """A wrapper that calls super().__init__ and delegates the rest by __getattr__."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
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
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
