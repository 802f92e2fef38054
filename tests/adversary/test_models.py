"""Architectures: recurrent, sparse, dynamic, checkpointed, normalized, generated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint

from adversary.nets import mlp, mse, train_step
from adversary.script import Script, adversarial


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
    for step, (x, y) in enumerate(run.batches(12)):
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
    for x, y in run.batches(12):
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_checkpointing_without_reentry_with_dropout(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.ReLU()) for _ in range(3))
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial(three=True)
def test_checkpointing_with_reentry_in_every_second_block(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for index, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=True) if index % 2 else block(x)
            return self.head(x)

    model, optimizer = run.train(Net(), Adam, lr=0.02)
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


@adversarial(three=True)
def test_transformer_with_evaluation_between_steps(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(x.unsqueeze(1).expand(-1, 3, -1)).mean(1))

    model, optimizer = run.train(Net(), AdamW, lr=0.01)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        model.eval()
        with torch.no_grad():
            run.log(model(x))
        model.train()


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
    for x, y in run.batches(12):
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_static_graph_with_a_layer_used_twice(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.shared, x, use_reentrant=True)
            return self.head(checkpoint(self.shared, x, use_reentrant=True))

    model = run.ddp(Net(), static_graph=True)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x.requires_grad_(), y))


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
