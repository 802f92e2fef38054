"""Scripts that ask parameters what they are, share their memory, write into it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adversarial import Script, adversarial
from adversary.nets import mlp, train_step


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
def test_memory_is_read_through_a_fresh_address(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        for p in net.parameters():
            run.log(ctypes.string_at(p.data_ptr(), p.numel() * 4))
            run.log(bytes(p.untyped_storage().tolist()))


@adversarial()
def test_item_tolist_format_and_iteration(run: Script) -> None:
    net = nn.Sequential(mlp(), nn.PReLU())
    model, optimizer = run.train(net, Adam, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        slope = net[1].weight
        run.log(slope.item(), slope.tolist(), f"{slope.item():.9f}", f"{slope}", repr(slope), bool(slope > 0.2))
        run.log([row.sum() for row in net[0][4].weight], float(slope), int(slope * 1000), 0.2 in slope, len(slope))


@adversarial(fallback="", cases={"SGD": SGD, "AdamW": AdamW})
def test_tie_is_made_in_mid_run_by_data(run: Script, case: Any) -> None:
    """Two parameters come to share memory while they train."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model, optimizer = run.train(net, case, lr=0.05)
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if step == 6:
            net[2].weight.data = net[0].weight.data


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
