"""Architectures that write, compute or choose their weights in forward, or run backwards of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from adversarial import ALIASED, Script, adversarial
from adversary.nets import mlp, mse, train_step


@adversarial(three=True)
def test_embedding_with_max_norm_and_padding(run: Script) -> None:
    """max_norm writes to the weight inside of forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 8, padding_idx=0, max_norm=0.5)
            self.head = mlp()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(tokens).mean(1))

    model, optimizer = run.train(Net(), SGD, lr=0.5)
    for step, (x, y) in enumerate(run.batches()):
        tokens = (torch.arange(len(x) * 5).view(len(x), 5) * (step + 2) + run.rank) % 20
        run.log(train_step(model, optimizer, tokens, y))


class Experts(nn.Module):
    """The top expert only; the others get no gradient on this rank."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(8, count)
        self.experts = nn.ModuleList(mlp() for _ in range(count))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.experts[choice](x) * self.gate(x).softmax(-1)[:, choice : choice + 1]


@adversarial(three=True)
def test_mixture_of_experts_with_unused_experts(run: Script) -> None:
    model = run.ddp(Experts(), find_unused_parameters=True)
    optimizer = AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        loss = mse(model(x, (step * step + run.rank) % 4), y)
        loss.backward()
        optimizer.step()
        run.log(loss, [p.grad is None for p in model.parameters()])


@adversarial()
def test_actnorm_initializes_from_the_first_batch(run: Script) -> None:
    class ActNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
            self.register_buffer("ready", torch.tensor(False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.ready:
                self.scale.data.copy_(1 / (x.std(0) + 1e-3))
                self.shift.data.copy_(-x.mean(0))
                self.ready.fill_(True)
            return (x + self.shift) * self.scale

    model, optimizer = run.train(nn.Sequential(ActNorm(), mlp()), Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_weight_norm_and_spectral_norm_old_and_new(run: Script) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)),
            nn.utils.weight_norm(nn.Linear(16, 16)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
            nn.utils.spectral_norm(nn.Linear(16, 4)),
        )
    model, optimizer = run.train(net, Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if step % 3 == 0:
            run.log(net[0].weight, net[2].weight, net[3].weight)


@adversarial()
def test_vqvae_with_codebook_averages_in_buffers(run: Script) -> None:
    import torch.distributed as dist

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(outputs=6), mlp(6)
            self.register_buffer("codes", torch.randn(5, 6))
            self.register_buffer("sizes", torch.ones(5))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            z = self.encoder(x)
            hot = F.one_hot(torch.cdist(z, self.codes).argmin(1), 5).float()
            q = hot @ self.codes
            if self.training:
                with torch.no_grad():
                    count, total = hot.sum(0), hot.T @ z
                    dist.all_reduce(count)
                    dist.all_reduce(total)
                    self.sizes.mul_(0.9).add_(count, alpha=0.1)
                    self.sums.mul_(0.9).add_(total, alpha=0.1)
                    self.codes.copy_(self.sums / self.sizes.clamp(min=1e-2).unsqueeze(1))
            return self.decoder(z + (q - z).detach()), 0.25 * mse(z, q.detach())

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        output, commitment = model(x)
        (mse(output, y) + commitment).backward()
        optimizer.step()
        run.log(output)


@adversarial()
def test_control_flow_depends_on_the_weights(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if float(self.left.weight.norm()) > float(self.right.weight.norm()):
                x = self.left(x).relu()
            else:
                x = self.right(x).tanh()
            return self.head(x)

    model = run.ddp(Net(), find_unused_parameters=True)
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    run.attach(model, optimizer)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_reversible_blocks_rebuild_their_inputs_in_backward(run: Script) -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, f: nn.Module, g: nn.Module) -> torch.Tensor:
            a, b = x.chunk(2, 1)
            with torch.no_grad():
                a = a + f(b)
                b = b + g(a)
            ctx.modules = f, g
            out = torch.cat([a, b], 1)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            f, g = ctx.modules
            a, b = ctx.saved_tensors[0].chunk(2, 1)
            da, db = grad.chunk(2, 1)
            with torch.enable_grad():
                a = a.detach().requires_grad_()
                ga = g(a)
            ga.backward(db)
            with torch.enable_grad():
                b0 = (b - ga).detach().requires_grad_()
                fb = f(b0)
            da = da + a.grad
            fb.backward(da)
            return torch.cat([da, db + b0.grad], 1), None, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.pairs = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = Reverse.apply(self.stem(x), self.pairs[0], self.pairs[1])
            return self.head(Reverse.apply(x, self.pairs[2], self.pairs[3]))

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial(fallback=ALIASED)
def test_deep_equilibrium_with_a_hook_for_its_backward(run: Script) -> None:
    class Net(nn.Module):
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

    model, optimizer = run.train(Net(), Adam, lr=0.01)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial(fallback="is read in forward by code that bypasses __torch_function__")
def test_parametrized_orthogonal_and_symmetric_matrices_with_cache(run: Script) -> None:
    from torch.nn.utils import parametrize

    class Symmetric(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w.triu() + w.triu(1).T

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


@adversarial()
def test_learnt_step_sizes_and_fake_quantization(run: Script) -> None:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(w, s)
            return (w / s).round().clamp(-4, 3) * s

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            w, s = ctx.saved_tensors
            inside = ((w / s) >= -4) & ((w / s) <= 3)
            ds = torch.where(inside, (w / s).round() - w / s, (w / s).clamp(-4, 3))
            return grad * inside, (grad * ds).sum().view_as(s)

    class Quantized(nn.Linear):
        def __init__(self, i: int, o: int) -> None:
            super().__init__(i, o)
            self.size = nn.Parameter(torch.tensor(0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, Round.apply(self.weight, self.size), self.bias)

    model, optimizer = run.train(nn.Sequential(Quantized(8, 16), nn.ReLU(), Quantized(16, 4)), Adam, lr=0.01)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
