"""Public functions of torch that look at a tensor's memory without asking its class."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

from adversarial import GRADIENTS_READ, KEPT, PAST_EVERYTHING, Script, adversarial
from adversary.nets import mlp, mse, train_step


@adversarial(refused=PAST_EVERYTHING, strict=False)
def test_torch_tensor_copies_a_parameter(run: Script) -> None:
    """`torch.tensor(p)`, of which torch warns, and which everybody writes."""
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.log([torch.tensor(p) for p in net.parameters()])


@adversarial(refused=PAST_EVERYTHING, strict=False)
def test_new_tensor_of_another_tensor_copies_a_parameter(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.log(x.new_tensor(net[0].weight))


@adversarial(refused=PAST_EVERYTHING, strict=False)
def test_as_tensor_casts_a_parameter(run: Script) -> None:
    """To sum up in fp64."""
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with torch.no_grad():
            run.log([torch.as_tensor(p, dtype=torch.float64).sum() for p in net.parameters()])


@adversarial(refused=PAST_EVERYTHING, strict=False)
def test_sparse_and_nested_tensors_of_parameters(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    index = torch.arange(4).unsqueeze(0)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.log(torch.sparse_coo_tensor(index, net[4].bias, (4,)))
            run.log(torch.nested.nested_tensor([net[0].weight]).to_padded_tensor(0.0))


@adversarial(refused=PAST_EVERYTHING, strict=False)
def test_reduce_scatter_of_a_list_of_parameters(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        out = torch.empty(4)
        with torch.no_grad():
            dist.reduce_scatter(out, [net[4].bias] * run.world_size)
        run.log(out)


@adversarial()
def test_parameter_is_made_of_a_parameter(run: Script) -> None:
    """A frozen copy of a layer, made by `nn.Parameter(layer.weight)`."""
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        frozen = nn.Linear(8, 16)
        frozen.weight = nn.Parameter(net[0].weight, requires_grad=False)
        run.log(frozen.weight)
        del frozen


@adversarial(fallback="")
def test_parameter_is_made_of_a_gradient(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        run.log(nn.Parameter(net[0].weight.grad, requires_grad=False))
        optimizer.step()


@adversarial(fallback=GRADIENTS_READ)
def test_gradient_goes_through_dlpack(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        run.log(torch.from_dlpack(torch.utils.dlpack.to_dlpack(net[0].weight.grad)))
        optimizer.step()


@adversarial(fallback=KEPT)
def test_gradient_becomes_the_data_of_a_buffer(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)
    last = torch.zeros(16, 8)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        last.data = net[0].weight.grad
        run.log(last.norm())
        optimizer.step()


@pytest.mark.xfail(strict=True, reason="type(p.grad) is torch.Tensor is False while a gradient is on the wire")
@adversarial(fallback="")
def test_exact_type_of_gradients(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        run.log([type(p.grad) is torch.Tensor for p in net.parameters()])
        optimizer.step()
        run.log([type(p.grad) is torch.Tensor for p in net.parameters()])


@adversarial(fallback="")
def test_gradients_are_copied_in_all_these_ways(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.log(torch.tensor(net[0].weight.grad), x.new_tensor(net[0].bias.grad))
            run.log(torch.nested.nested_tensor([net[2].weight.grad]).to_padded_tensor(0.0))
        run.log(torch.as_tensor(net[2].bias.grad, dtype=torch.float64), torch.asarray(net[4].weight.grad))
        dist.group.WORLD.allreduce([net[4].bias.grad]).wait()
        optimizer.step()


@adversarial(fallback="")
def test_compiled_function_closes_over_a_gradient(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)

    @torch.compile(backend="eager")
    def project(g: torch.Tensor) -> torch.Tensor:
        return g - g.mean()

    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        for p in net.parameters():
            p.grad.copy_(project(p.grad))
        optimizer.step()


@adversarial(fallback="")
def test_compiled_function_of_parameters_between_steps(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)

    @torch.compile(backend="eager")
    def norm(weights: list[torch.Tensor]) -> torch.Tensor:
        return sum(w.pow(2).sum() for w in weights)

    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log(norm(list(net.parameters())))
