"""Scripts that write to weights themselves: the second half."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adversary.nets import mlp, mse, train_step
from adversary.script import ALIASED, Script, adversarial


@adversarial(three=True)
def test_decay_over_a_list_of_matrices_before_forward(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.9)
    matrices = [p for n, p in net.named_parameters() if n.endswith("weight")]
    for x, y in run.batches():
        torch._foreach_mul_([m.data for m in matrices], 0.99)
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_weights_are_written_through_numpy(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        array = net[2].weight.detach().numpy()
        np.clip(array, -0.2, 0.2, out=array)
        del array


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
def test_lookahead_by_hand_over_param_groups(run: Script) -> None:
    net = mlp()
    model = run.ddp(net)
    optimizer = AdamW([{"params": layer.parameters()} for layer in net if isinstance(layer, nn.Linear)], lr=0.05)
    run.attach(model, optimizer)
    slow = [[p.detach().clone() for p in g["params"]] for g in optimizer.param_groups]
    for step, (x, y) in enumerate(run.batches(12)):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            for group, weights in zip(optimizer.param_groups, slow, strict=True):
                for p, w in zip(group["params"], weights, strict=True):
                    w.add_(p.data - w, alpha=0.5)
                    p.data.copy_(w)


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
