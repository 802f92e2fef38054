"""Several losses, several backward passes, gradients of gradients, gradients of inputs."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call
from torch.optim import SGD, Adam

from adversarial import ALIASED, Script, adversarial
from adversary.nets import mlp, mse, train_step


class Meta(nn.Module):
    """MAML: an inner loop on fast weights, through which the outer gradient goes."""

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


@adversarial(three=True)
def test_maml_inner_loop_on_fast_weights(run: Script) -> None:
    model, optimizer = run.train(Meta(), Adam, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_backward_with_inputs(run: Script) -> None:
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
def test_graphs_of_all_steps_stay_alive(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    losses: list[torch.Tensor] = []
    for x, y in run.batches():
        optimizer.zero_grad()
        losses.append(mse(model(x), y))
        losses[-1].backward(retain_graph=True)
        optimizer.step()
        run.log(sum(loss.detach() for loss in losses))


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
