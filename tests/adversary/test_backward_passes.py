"""Several losses, several backward passes, gradients of gradients, gradients of inputs."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, Adam

from adversarial import ALIASED, Script, adversarial
from adversary.nets import mlp, mse, train_step


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


@adversarial(fallback="")
def test_graph_of_the_step_before_is_used_once_more(run: Script) -> None:
    """The loss of the step before stays alive and is looked at, not run backward."""
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    previous: list[torch.Tensor] = []
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward(retain_graph=True)
        optimizer.step()
        previous.append(loss)
        run.log(previous[-2:] and sum(p.detach() for p in previous))


@adversarial(fallback=ALIASED)
def test_second_backward_on_an_old_graph_is_the_error_of_autograd(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches(10)):
        old = mse(net(x), y) if step % 4 == 3 else None
        train_step(model, optimizer, x, y)
        if old is not None:
            try:
                torch.autograd.grad(old, list(net.parameters()))
            except RuntimeError as error:
                run.log("modified by an inplace operation" in str(error))
            del old


@adversarial(fallback=ALIASED)
def test_gradient_of_the_step_is_part_of_a_later_graph(run: Script) -> None:
    """A graph over the parameters stays alive across steps, as of an unfinished inner loop."""
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    alive: list[torch.Tensor] = []
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        alive = [net(x)]
    run.log(alive)
