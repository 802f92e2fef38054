"""Public functions of torch that look at a tensor's memory without asking its class."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

from adversarial import GRADIENTS_READ, KEPT, PAST_EVERYTHING, Script, adversarial
from adversary.nets import mlp, mse, train_step


def _sparse(run: Script, net: nn.Sequential) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.arange(4).unsqueeze(0), net[4].bias, (4,))


def _reduce_scatter_of_a_list(run: Script, net: nn.Sequential) -> torch.Tensor:
    out = torch.empty(4)
    dist.reduce_scatter(out, [net[4].bias] * run.world_size)
    return out


def _gathered_by_the_group(run: Script, net: nn.Sequential) -> Any:
    outputs = [[torch.zeros(16, 16) for _ in range(run.world_size)]]
    dist.group.WORLD.allgather(outputs, [net[2].weight]).wait()
    return outputs


# Others are in pending/test_covers.py.
READS = {read.__name__.strip("_"): read for read in (_sparse, _reduce_scatter_of_a_list, _gathered_by_the_group)}


@adversarial(cases=READS, refused=PAST_EVERYTHING, strict=False)
def test_a_parameter_is_read(run: Script, case: Callable[[Script, nn.Sequential], Any]) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.log(case(run, net))


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
def test_compiled_function_of_parameters_between_steps(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)

    @torch.compile(backend="eager")
    def norm(weights: list[torch.Tensor]) -> torch.Tensor:
        return sum(w.pow(2).sum() for w in weights)

    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log(norm(list(net.parameters())))
