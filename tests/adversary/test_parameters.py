"""Scripts that ask parameters what they are, share their memory, freeze them."""

from __future__ import annotations

import ctypes
import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adversarial import PAST_EVERYTHING, Script, adversarial
from adversary.nets import mlp, mse, train_step


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
def test_memory_is_read_through_a_fresh_address(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        for p in net.parameters():
            run.log(ctypes.string_at(p.data_ptr(), p.numel() * 4))
            run.log(bytes(p.untyped_storage().tolist()))


@adversarial()
def test_all_tensors_that_the_collector_knows(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            ids = {id(p) for p in net.parameters()}
            # Not isinstance: it asks objects for their class, and a dead proxy of another library raises.
            parameters = [o for o in gc.get_objects() if issubclass(type(o), nn.Parameter)]
            run.log(sum(id(o) in ids for o in parameters))
            run.log(sum(p.norm().item() for p in net.parameters()))


@adversarial()
def test_functools_caches_and_dispatch_on_parameters(run: Script) -> None:
    @functools.singledispatch
    def describe(value: Any) -> str:
        return "something"

    @describe.register
    def _(value: nn.Parameter) -> str:
        return f"parameter of {value.sum().item()!r}"

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    total = functools.partial(functools.reduce, lambda a, p: a + p.pow(2).sum(), tuple(net.parameters()))
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log([describe(p) for p in net.parameters()], total(torch.tensor(0.0)))
        match net[0].weight:
            case nn.Parameter(shape=shape):
                run.log(tuple(shape))


@adversarial(fallback="")
def test_tie_is_made_in_mid_run_by_data(run: Script) -> None:
    """Two parameters come to share memory while they train."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model, optimizer = run.train(net, SGD, lr=0.05)
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if step == 6:
            net[2].weight.data = net[0].weight.data


@adversarial()
def test_freeze_by_grad_none_and_requires_grad_of_single_tensors(run: Script) -> None:
    net = mlp()
    model = run.ddp(net, find_unused_parameters=True)
    optimizer = AdamW(model.parameters(), lr=0.03)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches()):
        net[0].weight.requires_grad = step % 3 != 0
        net[2].bias.requires_grad_(step % 4 != 1)
        run.log(train_step(model, optimizer, x, y))


@adversarial(refused=PAST_EVERYTHING, strict=False)
def test_reads_past_torch_functions_of_subclasses(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            run.log([p.sum() for p in net.parameters()])
        run.log(mse(net(x), y))
