"""Architectures that write or compute their weights in forward, or run backwards of their own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import SGD, Adam

from adversarial import ALIASED, Script, adversarial
from adversary.nets import fit, mlp, mse, train_step


class Words(nn.Module):
    """`max_norm` writes to the weight inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0, max_norm=0.5)
        self.head = mlp()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens).mean(1))


@adversarial(three=True)
def test_embedding_with_max_norm_and_padding(run: Script) -> None:
    model, optimizer = run.train(Words(), SGD, lr=0.5)
    for step, (x, y) in enumerate(run.batches()):
        tokens = (torch.arange(len(x) * 5).view(len(x), 5) * (step + 2) + run.rank) % 20
        run.log(train_step(model, optimizer, tokens, y))


class DeepEquilibrium(nn.Module):
    """A hook of its output solves for the gradient, by backwards inside of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.inject, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.inner.weight.data.mul_(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(8):
                z = torch.tanh(self.inner(z) + self.inject(x))
        z = torch.tanh(self.inner(z) + self.inject(x))
        if self.training:
            z0 = z.clone().detach().requires_grad_()
            f0 = torch.tanh(self.inner(z0) + self.inject(x))

            def solve(grad: torch.Tensor) -> torch.Tensor:
                g = grad
                for _ in range(5):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
                return g

            z.register_hook(solve)
        return self.head(z)


@adversarial(fallback=ALIASED)
def test_deep_equilibrium_with_a_hook_for_its_backward(run: Script) -> None:
    fit(run, *run.train(DeepEquilibrium(), Adam, lr=0.01))


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).T


@adversarial(fallback="is read in forward by code that bypasses __torch_function__")
def test_parametrized_orthogonal_and_symmetric_matrices_with_cache(run: Script) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    parametrize.register_parametrization(net[0], "weight", Symmetric())
    nn.utils.parametrizations.orthogonal(net[2])
    model, optimizer = run.train(net, Adam, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        with parametrize.cached():
            loss = mse(model(x), y) + 0.1 * mse(model(-x), y)
        loss.backward()
        optimizer.step()
        run.log(loss, net[0].weight)
