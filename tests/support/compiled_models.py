"""A model with dropout, compiled in each of the ways in which people do it, and a loop that counts graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from equivalence import Run
from models import HIDDEN, INPUTS, OUTPUTS


class Block(nn.Module):
    """Draws random numbers, which inductor does in its own way, so a forward that ran eagerly would show."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.dropout(torch.tanh(self.first(x))))


class DecoratedBlock(Block):
    """Its class has a compiled forward."""

    @torch.compile(backend="aot_eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Net(nn.Module):
    """Blocks between two layers."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, HIDDEN)
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


Compile = partial[Any]


def blocks(net: Net, compiled: Compile) -> nn.Module:
    """Regional compilation."""
    net.blocks = nn.ModuleList([compiled(block) for block in net.blocks])
    return net


def blocks_in_place(net: Net, compiled: Compile) -> nn.Module:
    """The same with `Module.compile`."""
    for block in net.blocks:
        block.compile(**compiled.keywords)
    return net


def module(net: Net, compiled: Compile) -> nn.Module:
    """`DDP(torch.compile(module))`."""
    return compiled(net)


def module_in_place(net: Net, compiled: Compile) -> nn.Module:
    """`module.compile()`."""
    net.compile(**compiled.keywords)
    return net


def forward_method(net: Net, compiled: Compile) -> nn.Module:
    """`module.forward = torch.compile(module.forward)`."""
    net.forward = compiled(net.forward)  # type: ignore[method-assign]
    return net


def forward_methods_of_blocks(net: Net, compiled: Compile) -> nn.Module:
    """The same in a module that is compiled as a whole."""
    for block in net.blocks:
        block.forward = compiled(block.forward)
    return compiled(net)


def decorated_forward(net: Net, compiled: Compile) -> nn.Module:
    """`@torch.compile` over a forward."""
    return Net(DecoratedBlock)


class CallsACompiledFunction(Block):
    """A block whose forward passes a parameter to a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.compile(nn.functional.linear, backend="aot_eager", dynamic=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.project(x, self.second.weight)


def function(net: Net, compiled: Compile) -> nn.Module:
    """A compiled function outside of any compiled module."""
    return Net(CallsACompiledFunction)


def not_yet(net: Net, compiled: Compile) -> nn.Module:
    """The loop compiles the DDP object."""
    return net


def build(way: Callable[[Net, Compile], nn.Module], **options: Any) -> nn.Module:
    """A model, and a compiler that has not seen any."""
    torch.compiler.reset()
    counters.clear()
    return way(Net(), partial(torch.compile, **options))


def loop(
    run: Run,
    ddp: str = "",
    change_sizes: bool = False,
    accumulate: bool = False,
    evaluate: bool = False,
    optimize_ddp: bool = True,
    **options: Any,
) -> Iterator[Any]:
    """Train, and show losses, random numbers and how many graphs have been compiled up to each step.

    `ddp`: "before" or "after" the attach the DDP object is compiled, "in place" it is by its method.
    """
    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        model: Any = torch.compile(run.model, **options) if ddp == "before" else run.model
        run.attach()
        if ddp == "after":
            model = torch.compile(run.model, **options)
        elif ddp == "in place":
            run.model.compile(**options)
        x_eval, _ = run.batch(10_000)
        for index, (x, y) in enumerate(run.batches()):
            run.optimizer.zero_grad()
            if accumulate:
                with run.model.no_sync():
                    run.loss(model(x + 1), y).backward()
            if change_sizes and index in (4, 6):
                x, y = x.repeat(index, 1), y.repeat(index, 1)
            loss = run.loss(model(x), y)
            loss.backward()
            run.optimizer.step()
            evaluated = None
            if evaluate and index % 3 == 2:
                model.eval()
                with torch.no_grad():
                    evaluated = model(x_eval)
                model.train()
            yield loss, torch.get_rng_state(), counters["stats"]["unique_graphs"], evaluated
