"""Architectures: the second half."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from adversary.nets import mlp, mse, train_step
from adversary.script import ALIASED, Script, adversarial


@adversarial(three=True)
def test_sequence_to_sequence_with_attention_and_shared_embedding(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(11, 8)
            self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.LSTMCell(8, 8)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            memory, h = self.encoder(self.words(source))
            h, c = h[0], torch.zeros_like(h[0])
            losses = []
            for t in range(target.shape[1] - 1):
                h, c = self.decoder(self.words(target[:, t]), (h, c))
                seen, _ = self.attend(h[:, None], memory, memory, need_weights=False)
                losses.append(F.cross_entropy(seen[:, 0] @ self.words.weight.T, target[:, t + 1]))
            return torch.stack(losses).mean()

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for step in range(10):
        tokens = (torch.arange(10).view(2, 5) * (step + 3) + run.rank) % 11
        optimizer.zero_grad()
        loss = model(tokens, tokens.flip(1)[:, : 3 + step % 3])
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_embedding_bag_with_max_norm_and_frozen_rows(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(20, 8, mode="mean", max_norm=0.7)
            self.fixed = nn.Embedding.from_pretrained(torch.randn(20, 8), freeze=True)
            self.head = mlp()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.bag(tokens) + self.fixed(tokens).mean(1))

    model = run.ddp(Net())
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches()):
        tokens = (torch.arange(len(x) * 3).view(len(x), 3) * (step + 1)) % 20
        run.log(train_step(model, optimizer, tokens, y))


@adversarial()
def test_truncated_backpropagation_through_time(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
            out, state = self.lstm(x, state)
            return self.head(out[-1]), state

    model, optimizer = run.train(Net(), SGD, lr=0.2, momentum=0.9)
    state = None
    for x, y in run.batches(12):
        optimizer.zero_grad()
        out, state = model(torch.stack([x, -x]), state)
        loss = mse(out, y)
        loss.backward()
        optimizer.step()
        state = tuple(s.detach() for s in state)
        run.log(loss)


@adversarial()
def test_soft_mixture_of_experts_with_stacked_weights(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.up, self.down = nn.Parameter(torch.randn(4, 8, 12) * 0.3), nn.Parameter(torch.randn(4, 12, 4) * 0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, index = self.gate(x).softmax(-1).topk(2)
            out = torch.zeros(len(x), 4)
            for e in index.unique():
                rows, slot = (index == e).nonzero(as_tuple=True)
                h = (x[rows] @ self.up[e]).relu() @ self.down[e]
                out = out.index_add(0, rows, h * weight[rows, slot, None])
            return out

    model, optimizer = run.train(Net(), AdamW, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_layer_dropout_by_numpy_equal_on_all_ranks(run: Script) -> None:
    import numpy as np

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(mlp(outputs=8) for _ in range(3)), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                if np.random.rand() < 0.6:
                    x = x + block(x)
            return self.head(x)

    model = run.ddp(Net(), find_unused_parameters=True)
    optimizer = Adam(model.parameters(), lr=0.02)
    run.attach(model, optimizer)
    np.random.seed(7)
    for x, y in run.batches(14):
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_checkpoint_sequential_over_segments(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint_sequential(self.body, 3, x, use_reentrant=False))

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial(three=True)
def test_nested_checkpoints_with_random_dropout(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.two(x), 0.3, self.training)

        def outer(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, F.dropout(self.one(x), 0.3, self.training), use_reentrant=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.outer, x, use_reentrant=False))

    model, optimizer = run.train(Net(), SGD, lr=0.1, momentum=0.9)
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
def test_weight_of_a_parametrization_is_exported_to_a_plain_layer(run: Script) -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer = run.train(net, Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 3 == 2:
            exported = nn.utils.skip_init(nn.Linear, 8, 16)
            exported.load_state_dict({"weight": net[0].weight, "bias": net[0].bias})
            run.log(exported.state_dict(), exported(x))


@adversarial()
def test_conv_with_batch_norm_fused_for_evaluation(run: Script) -> None:
    import copy

    from torch.nn.utils.fusion import fuse_conv_bn_eval

    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
    net = net.to(memory_format=torch.channels_last)
    model, optimizer = run.train(net, SGD, lr=0.05, momentum=0.9)
    for step, (x, y) in enumerate(run.batches()):
        x = x.view(-1, 1, 2, 4)
        run.log(train_step(model, optimizer, x, y))
        if step % 3 == 2:
            net.eval()
            fused = fuse_conv_bn_eval(copy.copy(net[0]), net[1])
            run.log(fused(x))
            net.train()


@adversarial()
def test_noisy_layers_of_rainbow_and_bayes_by_backprop(run: Script) -> None:
    class Noisy(nn.Module):
        def __init__(self, i: int, o: int) -> None:
            super().__init__()
            self.mu, self.rho = nn.Parameter(torch.randn(o, i) * 0.2), nn.Parameter(torch.full((o, i), -3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sigma = F.softplus(self.rho)
            self.kl = (self.mu.pow(2) + sigma.pow(2)).sum() - sigma.log().sum()
            return F.linear(x, self.mu + sigma * torch.randn_like(sigma))

    net = nn.Sequential(Noisy(8, 16), nn.Tanh(), Noisy(16, 4))
    model, optimizer = run.train(net, Adam, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y) + 1e-4 * (net[0].kl + net[2].kl)
        loss.backward()
        optimizer.step()
        run.log(loss)


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


@adversarial()
def test_layers_of_a_normalizing_flow_run_backwards_for_samples(run: Script) -> None:
    class Coupling(nn.Module):
        def __init__(self, flip: bool) -> None:
            super().__init__()
            self.net, self.flip = mlp(4, 8, 8), flip

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
            s, t = self.net(a).chunk(2, 1)
            s = s.tanh()
            return torch.cat([a, b * s.exp() + t], 1), s.sum(1)

        def inverse(self, z: torch.Tensor) -> torch.Tensor:
            a, b = z.chunk(2, 1)
            s, t = self.net(a).chunk(2, 1)
            out = torch.cat([a, (b - t) * (-s.tanh()).exp()], 1)
            return out.flip(1) if self.flip else out

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(Coupling(bool(i % 2)) for i in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = 0.0
            for step in self.steps:
                x, log = step(x)
                total = total + log
            return (0.5 * x.pow(2).sum(1) - total).mean()

    net = Flow()
    model, optimizer = run.train(net, Adam, lr=0.01)
    for x, _ in run.batches():
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            z = torch.ones(2, 8)
            for step in reversed(net.steps):
                z = step.inverse(z)
        run.log(loss, z)


@adversarial()
def test_model_is_traced_and_transformed_between_steps(run: Script) -> None:
    from torch import fx

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 3 == 2:
            traced = fx.symbolic_trace(net)
            run.log(traced(x), sum(p.numel() for p in traced.parameters()))
            run.log(fx.Interpreter(traced).run(x))
