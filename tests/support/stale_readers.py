"""Loops that look at parameters through compilers, modes and contexts, or ask what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from equivalence import Run, plain_loop, train_step
from models import HIDDEN, INPUTS, OUTPUTS

LATE = 4  # long after the first forwards


class DetachedRegularizerNet(nn.Module):
    """At first, and then every third time, nothing reads the head's weight before the head does; later the first
    layer's forward scales by it, as by a constant, which backward never hears of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, OUTPUTS)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scale = self.head.weight.data.norm() if self.calls > LATE and self.calls % 3 else 1.0
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))) * scale)


def traced(run: Run) -> Iterator[Any]:
    """`torch.jit.trace`, which must not record the updates; it compares two traces by itself."""
    module = run.model.module
    for index, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
        yield loss, torch.jit.trace(module, x)(x).detach() if index % 3 == 0 else None


def exported(run: Run) -> Iterator[Any]:
    """`torch.export` by dynamo; the program holds the live parameters."""
    module = run.model.module
    program = None
    for index, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
        if index % 7 == 5:
            program = torch.export.export(module, (x,), strict=True).module()
        yield loss, program and program(x).detach()


def compiled_after_a_reset(run: Run) -> Iterator[Any]:
    """`torch.compiler.reset()` forgets all that anybody has registered, and then something new is compiled."""
    weight = run.model.module.first.weight
    for index, loss in enumerate(plain_loop(run)):
        if index % 5 == 4:
            torch.compiler.reset()
            yield loss, torch.compile(lambda w: w.square().sum(), backend="aot_eager")(weight).detach()
        else:
            yield loss


def identity(run: Run) -> Iterator[Any]:
    """Parameters stay the objects that they were, for `is`, `in`, sets, dicts and `isinstance`."""
    parameters = list(run.model.parameters())
    module = run.model.module
    known, index_of = set(parameters), {p: index for index, p in enumerate(parameters)}
    for loss in plain_loop(run):
        now = list(module.parameters())
        yield (
            loss,
            [p is q for p, q in zip(now, parameters, strict=True)],
            [p in known and index_of[p] == index for index, p in enumerate(now)],
            [any(p is q for q in parameters) for group in run.optimizer.param_groups for p in group["params"]],
            [isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor) for p in parameters],
            [(p.requires_grad, p.is_leaf, p.grad_fn, tuple(p.shape), p.dtype, str(p.device)) for p in parameters],
            sum(p.numel() for p in parameters),
        )


def attributes_of_parameters(run: Run) -> Iterator[Any]:
    """Marks that a framework leaves on parameters (Megatron's `p.shared`) stay, and no other appears."""
    parameters: list[Any] = list(run.model.parameters())
    for p in parameters:
        p.shared = False
    for index, loss in enumerate(plain_loop(run)):
        parameters[index % len(parameters)].marked_at = index
        yield loss, [sorted(vars(p).items()) for p in parameters]


def requires_grad_toggled(run: Run) -> Iterator[Any]:
    """As GANs do it: off and on again while the update is pending, without any forward between."""
    parameters = list(run.model.parameters())
    for loss in plain_loop(run):
        for p in parameters:
            p.requires_grad_(False)
        frozen = [p.requires_grad for p in parameters]
        for p in parameters:
            p.requires_grad = True
        yield loss, frozen, [p.requires_grad for p in parameters]


def count_flops(run: Run, whole_loop: bool) -> Iterator[Any]:
    """The counter sees what the script computes, and none of what updates cost."""
    weights = list(run.model.parameters())[:1]
    counter = FlopCounterMode(display=False)
    for x, y in run.batches():
        run.optimizer.zero_grad()
        counter = counter if whole_loop else FlopCounterMode(display=False)
        with counter:
            loss = run.loss(run.model(x), y)
            loss.backward()
        run.optimizer.step()
        with counter:
            product = weights[0] @ x.T
        yield loss, counter.get_total_flops(), product.detach()


def write_in_inference_mode(run: Run) -> Iterator[Any]:
    """Clips in inference mode, from the very first step on."""
    parameters = list(run.model.parameters())
    for loss in plain_loop(run):
        with torch.inference_mode():
            for p in parameters:
                p.clamp_(-0.3, 0.3)
        yield loss


def print_parameters(run: Run) -> Iterator[Any]:
    """`repr`, `tolist`, `item`, formatting and comparison."""
    parameters = list(run.model.parameters())
    for loss in plain_loop(run):
        first, last = run.model.module.first.weight, parameters[-1]
        values = last.detach().tolist()
        yield loss, values, f"{first.flatten()[0].item():.9f}", str(last.data), len(first), first.sum().item() > 0
