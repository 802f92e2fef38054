"""Architectures: recurrent, sparse, dynamic, checkpointed, normalized, generated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

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


@adversarial()
def test_lstm_over_packed_sequences(run: Script) -> None:
    from torch.nn.utils.rnn import pack_padded_sequence

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
            self.head = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lengths = torch.tensor([3 - i % 3 for i in range(len(x))])
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, (h, _) = self.lstm(packed)
            return self.head(torch.cat([h[-1], h[-2]], 1))

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, torch.stack([x, x.flip(1), -x], 1), y))


@adversarial()
def test_gru_cell_unrolled_for_a_varying_number_of_steps(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 4)
            self.start = nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
            h = self.start.expand(len(x), 8)
            for _ in range(steps):
                h = self.cell(x, h)
            return self.head(h)

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        mse(model(x, 1 + step % 4), y).backward()
        optimizer.step()


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
def test_stochastic_depth_drops_whole_blocks(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                if not self.training or torch.rand(()) > 0.4:
                    x = x + block(x).relu()
            return self.head(x)

    model = run.ddp(Net(), find_unused_parameters=True)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.attach(model, optimizer)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_tied_embeddings_and_a_layer_used_three_times(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.shared = nn.Embedding(12, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            h = self.words(tokens)
            for _ in range(3):
                h = self.shared(h).tanh()
            return self.head(h)

    model, optimizer = run.train(Net(), AdamW, lr=0.02)
    for step in range(10):
        tokens = (torch.arange(12).view(2, 6) * 5 + step + run.rank) % 12
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_weight_standardization_and_group_norm(run: Script) -> None:
    class StandardConv(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.weight
            w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
            return F.conv2d(x, w, self.bias, padding=1)

    net = nn.Sequential(
        StandardConv(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), StandardConv(4, 4, 3), nn.Flatten(), nn.Linear(32, 4)
    )
    model, optimizer = run.train(net, SGD, lr=0.05, momentum=0.9)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x.view(-1, 1, 2, 4), y))


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
def test_hypernetwork_makes_the_weights_of_another(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.task, self.hyper = nn.Parameter(torch.randn(3)), nn.Linear(3, 8 * 4 + 4)
            self.trunk = mlp(outputs=8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.hyper(self.task)
            return F.linear(self.trunk(x), made[:32].view(4, 8), made[32:])

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


class Net_(nn.Module):
    """Gumbel-softmax and a straight-through binarizer, with a custom function."""

    class Binarize(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(w)
            return w.sign()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (w,) = ctx.saved_tensors
            return grad * (w.abs() <= 1)

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.choice = nn.Parameter(torch.randn(8, 8) * 0.5), nn.Parameter(torch.zeros(3))
        self.arms = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, self.Binarize.apply(self.weight))
        mix = F.gumbel_softmax(self.choice, tau=0.5)
        return sum(m * arm(h) for m, arm in zip(mix, self.arms, strict=True))


@adversarial()
def test_gumbel_choices_and_binary_weights_straight_through(run: Script) -> None:
    model, optimizer = run.train(Net_(), Adam, lr=0.05)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


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
def test_outputs_are_dataclasses_of_nested_lists(run: Script) -> None:
    from dataclasses import dataclass, field

    @dataclass
    class Output:
        logits: torch.Tensor
        hidden: list[dict[str, torch.Tensor]] = field(default_factory=list)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, *, inputs: dict[str, torch.Tensor]) -> Output:
            h = self.stem(inputs["x"])
            return Output(self.head(h.relu()), [{"h": h}])

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        output = model(inputs={"x": x})
        (mse(output.logits, y) + 0.01 * output.hidden[0]["h"].pow(2).mean()).backward()
        optimizer.step()
        run.log(output.hidden)


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
    for x, y in run.batches():
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
    for x, y in run.batches():
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
