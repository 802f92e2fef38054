"""Several losses, several backward passes, gradients of gradients, gradients of inputs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from adversary.nets import mlp, mse, train_step
from adversary.script import GRADIENTS_READ, Script, adversarial


@adversarial(three=True)
def test_pgd_attack_before_each_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        attacked = x.clone()
        for _ in range(3):
            attacked.requires_grad_()
            (slope,) = torch.autograd.grad(mse(model.module(attacked), y), attacked)
            attacked = (attacked + 0.02 * slope.sign()).clamp(x - 0.1, x + 0.1).detach()
        run.log(train_step(model, optimizer, attacked, y))


@adversarial()
def test_fgsm_by_a_backward_through_the_ddp(run: Script) -> None:
    """The attack's backward fills the gradients, which are cleared afterwards."""
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        x.requires_grad_()
        mse(model(x), y).backward()
        attacked = (x + 0.05 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = mse(model(attacked), y)
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial(fallback=GRADIENTS_READ)
def test_two_losses_backward_one_after_the_other_over_one_graph(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        out = model(x)
        mse(out[:, :2], y[:, :2]).backward(retain_graph=True)
        mse(out[:, 2:], y[:, 2:]).backward()
        optimizer.step()


@adversarial()
def test_two_forwards_one_backward(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y) + 0.3 * mse(model(x.flip(0)), y)
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_two_forwards_two_backwards_one_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        mse(model(x.flip(0)), y).backward()
        optimizer.step()


@adversarial()
def test_forward_without_backward_in_training_mode(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches(12)):
        if step % 3 == 1:
            run.log(model(x))
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_penalty_on_the_gradient_of_the_loss(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.01)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.01 * sum(s.pow(2).sum() for s in slopes)).backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_l1_and_l2_from_a_list_of_parameters_in_the_loss(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    params = list(net.parameters())
    for x, y in run.batches():
        optimizer.zero_grad()
        penalty = sum(p.abs().sum() for p in params) * 1e-3 + sum(p.pow(2).sum() for p in params) * 1e-2
        loss = mse(model(x), y) + penalty
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_elastic_weight_consolidation(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05, momentum=0.9)
    anchor: dict[str, torch.Tensor] = {}
    fisher: dict[str, torch.Tensor] = {}
    for step, (x, y) in enumerate(run.batches(14)):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        for n, p in net.named_parameters():
            if n in anchor:
                loss = loss + (fisher[n] * (p - anchor[n]) ** 2).sum()
        loss.backward()
        optimizer.step()
        run.log(loss)
        if step == 6:
            anchor = {n: p.detach().clone() for n, p in net.named_parameters()}
            fisher = {n: p.grad.detach() ** 2 for n, p in net.named_parameters()}


@adversarial(three=True)
def test_maml_inner_loop_on_fast_weights(run: Script) -> None:
    from torch.func import functional_call

    class Meta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            fast = dict(self.net.named_parameters())
            for _ in range(2):
                inner = mse(functional_call(self.net, fast, (x,)), y)
                slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {n: p - 0.1 * s for (n, p), s in zip(fast.items(), slopes, strict=True)}
            return mse(functional_call(self.net, fast, (x.flip(0),)), y.flip(0))

    model, optimizer = run.train(Meta(), Adam, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_reptile_moves_towards_a_copy_that_was_trained(run: Script) -> None:
    import copy

    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        fast = copy.deepcopy(net)
        inner = SGD(fast.parameters(), lr=0.1)
        for _ in range(2):
            inner.zero_grad()
            mse(fast(x[:4]), y[:4]).backward()
            inner.step()
        with torch.no_grad():
            for p, f in zip(net.parameters(), fast.parameters(), strict=True):
                dist.all_reduce(f.data)
                p.add_(f.data / run.world_size - p, alpha=0.3)


@adversarial(three=True)
def test_contrastive_loss_over_gathered_features(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, _ in run.batches():
        x = x[:4]
        z = F.normalize(model(torch.cat([x, x + 0.1])), dim=1)
        one, two = z.chunk(2)
        everywhere = [torch.zeros_like(two) for _ in range(run.world_size)]
        dist.all_gather(everywhere, two.detach())
        everywhere[run.rank] = two
        logits = one @ torch.cat(everywhere).T / 0.1
        loss = F.cross_entropy(logits, torch.arange(4) + 4 * run.rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_backward_with_inputs_skips_a_layer(run: Script) -> None:
    """Only the named parameters get a gradient, DDP hears of the others through find_unused_parameters."""
    net = mlp()
    model = run.ddp(net, find_unused_parameters=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward(inputs=list(net.parameters()))
        optimizer.step()
        run.log(loss)


@adversarial()
def test_anomaly_detection_and_saved_tensor_hooks(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        with torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True):
            loss = mse(model(x), y)
            loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_forward_mode_derivative_between_steps(run: Script) -> None:
    from torch.func import functional_call, jvp

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        weights = dict(net.named_parameters())
        directions = {n: torch.ones_like(p) for n, p in weights.items()}
        run.log(jvp(lambda w, x=x: functional_call(net, w, (x,)), (weights,), (directions,))[1])
