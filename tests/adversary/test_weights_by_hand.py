"""Scripts that write to weights themselves: clipping, decay, projections, outer optimizers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from adversarial import ALIASED, Script, adversarial
from adversary.nets import mlp, mse, train_step


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
def test_out_arguments_write_into_parameters(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with torch.no_grad():
            torch.clamp(net[0].weight, -0.3, 0.3, out=net[0].weight.data)
            torch.mul(net[2].bias.data, 0.5, out=net[2].bias.data)
            torch.sub(net[4].weight.detach(), 0.001, out=net[4].weight.detach())


@adversarial()
def test_orthogonal_projection_by_qr_each_second_step(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 2:
            with torch.no_grad():
                q, r = torch.linalg.qr(net[2].weight)
                net[2].weight.copy_(q * r.diagonal().sign())


@adversarial()
def test_elastic_averaging_with_a_center_that_travels(run: Script) -> None:
    import torch.distributed as dist

    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    center = [p.detach().clone() for p in net.parameters()]
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 2:
            for c, p in zip(center, net.parameters(), strict=True):
                difference = 0.2 * (p.data - c)
                p.data -= difference
                dist.broadcast(difference, 0)
                c += difference
    run.log(center)


@adversarial()
def test_weights_are_quantized_for_forward_and_restored_for_step(run: Script) -> None:
    """BinaryConnect: full-precision copies are put back before the update."""
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)
    targets = [p for p in net.parameters() if p.ndim == 2]
    for x, y in run.batches():
        saved = [p.data.clone() for p in targets]
        for p in targets:
            p.data.copy_(p.data.sign() * p.data.abs().mean())
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        for p, s in zip(targets, saved, strict=True):
            p.data.copy_(s)
        optimizer.step()
        for p in targets:
            p.data.clamp_(-1, 1)
        run.log(loss)


@adversarial(fallback=ALIASED)
def test_weights_are_exchanged_with_data_for_forward_only(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)
    for x, y in run.batches():
        kept = [p.data for p in net.parameters()]
        for p in net.parameters():
            p.data = p.data.round(decimals=1)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        for p, k in zip(net.parameters(), kept, strict=True):
            p.data = k
        optimizer.step()
        run.log(loss)


@adversarial(three=True)
def test_sharpness_aware_by_hand_with_one_ddp_pass_and_one_local(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        optimizer.zero_grad()
        inner = torch.autograd.grad(mse(net(x), y), list(net.parameters()))
        scale = 0.05 / (torch.stack([g.norm() for g in inner]).norm() + 1e-12)
        with torch.no_grad():
            for p, g in zip(net.parameters(), inner, strict=True):
                p.add_(g * scale)
        loss = mse(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p, g in zip(net.parameters(), inner, strict=True):
                p.sub_(g * scale)
        optimizer.step()
        run.log(loss)


@adversarial()
def test_apply_visits_every_module(run: Script) -> None:
    model, optimizer = run.train(nn.Sequential(mlp(), nn.BatchNorm1d(4)), Adam, lr=0.05)

    def clip(module: nn.Module) -> None:
        if hasattr(module, "weight") and module.weight is not None:
            module.weight.data = module.weight.data.clamp(-0.5, 0.5)

    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        model.apply(clip)


@adversarial()
def test_evolution_perturbs_evaluates_and_takes_the_best(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            base = [p.clone() for p in net.parameters()]
            scores = []
            for _ in range(2):
                for p, b in zip(net.parameters(), base, strict=True):
                    p.copy_(b + 0.01 * torch.randn(b.shape, generator=generator))
                scores.append(net(torch.ones(1, 8)).sum().item())
            if scores[0] > scores[1]:
                for p, b in zip(net.parameters(), base, strict=True):
                    p.copy_(b)
        run.log(scores)


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


@adversarial(fallback="")
def test_wrapper_around_the_attached_optimizer(run: Script) -> None:
    model, inner = run.train(mlp(), Adam, lr=0.05)
    optimizer = Wrapped(inner)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
