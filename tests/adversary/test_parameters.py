"""Odd parameters, and scripts that hold on to them, swap them, freeze them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adversary.nets import mlp, mse, train_step
from adversary.script import ALIASED, Script, adversarial


class Odd(nn.Module):
    """Scalars, empty, transposed and very small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(16, 8).t())
        self.ones = nn.ParameterList(nn.Parameter(torch.full((1,), float(i))) for i in range(5))
        self.named = nn.ParameterDict({"in": nn.Parameter(torch.zeros(16)), "out": nn.Parameter(torch.zeros(4))})
        self.head = nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.turned + self.named["in"] + sum(self.ones)
        return self.head(h.tanh()) / self.temperature + self.named["out"] + self.nothing.sum()


@adversarial(three=True)
def test_scalar_empty_and_transposed_parameters(run: Script) -> None:
    model, optimizer = run.train(Odd(), AdamW, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_hundreds_of_tiny_parameters(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.randn(2)) for _ in range(200))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([(x[:, :2] * s).sum(1) for s in self.scales], 1)[:, :4] + sum(
                s.sum() for s in self.scales
            )

    model = run.ddp(Net())
    optimizer = Adam(model.parameters(), lr=0.01)
    run.attach(model, optimizer, fusion_mb=1e-3)
    for x, y in run.batches(8):
        run.log(train_step(model, optimizer, x, y))


@adversarial(three=True)
def test_bf16_fp64_and_fp32_parameters_in_one_model(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high, self.head = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8).double(), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.high(self.low(x.bfloat16()).double()).float())

    model, optimizer = run.train(Net(), AdamW, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_master_weights_in_fp32_for_a_bf16_model(run: Script) -> None:
    """Copies to and fro, as before autocast: the optimizer has the masters, the model is stepped by hand."""
    net = mlp().bfloat16()
    model = run.ddp(net)
    optimizer = SGD(model.parameters(), lr=0.0)
    run.attach(model, optimizer)
    masters = [p.detach().float().clone() for p in net.parameters()]
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x.bfloat16()), y.bfloat16()).backward()
        optimizer.step()
        for master, p in zip(masters, net.parameters(), strict=True):
            master.sub_(p.grad.float(), alpha=0.1)
            p.data.copy_(master)
    run.log(masters)


@adversarial()
def test_progressive_unfreezing_from_the_head_down(run: Script) -> None:
    net = mlp()
    model = run.ddp(net, find_unused_parameters=True)
    optimizer = AdamW(model.parameters(), lr=0.03, weight_decay=0.1)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches(15)):
        for depth, layer in enumerate((4, 2, 0)):
            net[layer].requires_grad_(step // 4 >= depth)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_freeze_right_after_step_and_evaluate(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        net.requires_grad_(False)
        run.log(net(x))
        net.requires_grad_(True)


@adversarial(fallback=ALIASED)
def test_one_flat_tensor_holds_all_weights(run: Script) -> None:
    """As apex and old fp16 wrappers lay out parameters: views of one buffer, which the script reads."""
    net = mlp()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    offset = 0
    for p in net.parameters():
        p.data = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    model, optimizer = run.train(net, Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y), flat.norm())
        flat.mul_(0.99)


@adversarial()
def test_generators_of_parameters_are_held_for_long(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    held = net.named_parameters()
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        pair = next(held, None)
        if pair is not None:
            run.log(pair[0], pair[1])


@adversarial()
def test_parameters_are_keys_of_dicts_and_members_of_sets(run: Script) -> None:
    import weakref

    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    names = {p: n for n, p in net.named_parameters()}
    refs = [weakref.ref(p) for p in net.parameters()]
    seen = weakref.WeakSet()
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log([names[p] for p in optimizer.param_groups[0]["params"]])
        run.log([r() is p for r, p in zip(refs, net.parameters(), strict=True)])
        run.log(sorted(names[p] for p in set(net.parameters())))
        for p in net.parameters():
            run.log(any(p is q for q in net.parameters()), p in names)
    run.log(len(seen))


@adversarial()
def test_types_and_flags_of_parameters_after_step(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log([isinstance(p, nn.Parameter) for p in net.parameters()])
        run.log([(p.is_leaf, p.requires_grad, p.grad_fn, p.device, p.layout, p.is_sparse) for p in net.parameters()])
        run.log([(p.type(), p.element_size(), p.is_contiguous(), tuple(p.stride())) for p in net.parameters()])
        run.log(sum(p.numel() for p in net.parameters()))


@pytest.mark.xfail(strict=True, reason="type(p) is nn.Parameter is False while an update is pending")
@adversarial()
def test_exact_type_of_parameters_after_step(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log([type(p) is nn.Parameter for p in net.parameters()])


@adversarial()
def test_versions_of_parameters_grow_with_each_step(run: Script) -> None:
    """A cache that is keyed by `_version`."""
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    cache: dict[int, tuple[int, torch.Tensor]] = {}
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        for index, p in enumerate(net.parameters()):
            if cache.get(index, (None,))[0] != p._version:
                cache[index] = (p._version, p.detach().norm())
        run.log([norm for _, norm in cache.values()])


@adversarial()
def test_initialization_is_done_again_in_mid_run(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches(12)):
        run.log(train_step(model, optimizer, x, y))
        if step == 6:
            torch.manual_seed(8)
            net[2].reset_parameters()
            nn.init.trunc_normal_(net[4].weight, std=0.1)
            nn.init.zeros_(net[4].bias)


@adversarial()
def test_dead_units_are_recycled_by_index(run: Script) -> None:
    """As ReDo and neuron resampling of sparse autoencoders do it."""
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches(12)):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            with torch.no_grad():
                dead = net[2].weight.abs().sum(1).argsort()[:3]
                net[2].weight[dead] = net[2].weight.mean(0)
                net[2].bias[dead] = 0.0
                net[4].weight[:, dead] *= 0.1
                optimizer.state[net[2].weight]["exp_avg"][dead] = 0.0


@adversarial(fallback="")
def test_tie_by_data_from_the_start(run: Script) -> None:
    """Two parameters, one memory: the optimizer adds both updates to it."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    net[2].weight.data = net[0].weight.data
    model, optimizer = run.train(net, SGD, lr=0.05)
    for x, y in run.batches(14):
        run.log(train_step(model, optimizer, x, y))


@adversarial(fallback="", three=True)
def test_tie_by_data_is_cut_and_made_again(run: Script) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model, optimizer = run.train(net, SGD, lr=0.05)
    for step, (x, y) in enumerate(run.batches(16)):
        run.log(train_step(model, optimizer, x, y))
        if step in (4, 12):
            net[2].weight.data = net[0].weight.data
        if step == 8:
            net[2].weight.data = net[0].weight.data.clone()


@adversarial(fallback="")
def test_memory_of_a_parameter_is_replaced_by_a_view_of_a_flat_tensor_in_mid_run(run: Script) -> None:
    """Weights are flattened after some steps; from then on the script reads and writes the flat tensor."""
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    flat = None
    for step, (x, y) in enumerate(run.batches(14)):
        run.log(train_step(model, optimizer, x, y))
        if step == 6:
            flat, offset = torch.cat([p.detach().flatten() for p in net.parameters()]), 0
            for p in net.parameters():
                p.data = flat[offset : offset + p.numel()].view_as(p)
                offset += p.numel()
        if flat is not None:
            run.log(flat.norm())
            flat.mul_(0.99)


@adversarial(fallback="")
def test_alias_is_taken_in_mid_run_and_read_for_the_rest(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    kept: list[torch.Tensor] = []
    for step, (x, y) in enumerate(run.batches(14)):
        run.log(train_step(model, optimizer, x, y))
        if step == 6:
            kept = [net[0].weight.data, net[2].weight.detach()[0], net[4].weight.view(-1).detach()]
        run.log([k.sum() for k in kept])
