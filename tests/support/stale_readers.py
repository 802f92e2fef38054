"""Loops that look at parameters through function transforms, modes and contexts, or ask what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, functionalize, grad, vmap
from torch.utils.flop_counter import FlopCounterMode

from equivalence import Run, snapshot, train_step
from models import HIDDEN, INPUTS, OUTPUTS

LATE = 4  # long after the first forwards


class LateRegularizerNet(nn.Module):
    """At first, and then every third time, nothing reads the head's weight before the head does; later
    the first layer's forward adds a penalty on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, OUTPUTS)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        penalty = self.head.weight.square().sum() if self.calls > LATE and self.calls % 3 else 0.0
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x))))) + 0.01 * penalty


class DetachedRegularizerNet(LateRegularizerNet):
    """The same where the value is read as a constant, which backward never hears of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scale = self.head.weight.data.norm() if self.calls > LATE and self.calls % 3 else 1.0
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))) * scale)


def functional_calls(run: Run) -> Iterator[Any]:
    """`functional_call` on a dict of parameters that was made once."""
    module = run.model.module
    parameters = dict(module.named_parameters())
    for x, y in run.batches():
        loss = train_step(run, x, y)
        yield loss, functional_call(module, parameters, (x,))


def functional_gradients(run: Run) -> Iterator[Any]:
    """`torch.func.grad` with respect to the same dict."""
    module = run.model.module
    parameters = dict(module.named_parameters())

    def loss_of(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return run.loss(functional_call(module, values, (x,)), y)

    for x, y in run.batches():
        loss = train_step(run, x, y)
        yield loss, snapshot(grad(loss_of)(parameters, x, y))


def per_sample_gradients(run: Run) -> Iterator[Any]:
    """`vmap` over `grad`, as differential privacy does it."""
    module = run.model.module
    parameters = dict(module.named_parameters())

    def loss_of(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return run.loss(functional_call(module, values, (x,)), y)

    for x, y in run.batches():
        loss = train_step(run, x, y)
        yield loss, snapshot(vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y))


def mapped_over_the_batch(run: Run) -> Iterator[Any]:
    """`vmap` of the bare module, and of a function that closes over parameters."""
    module = run.model.module
    weight, bias = module.first.weight, module.first.bias
    for x, y in run.batches():
        loss = train_step(run, x, y)
        closed = vmap(lambda row: weight @ row + bias)(x)
        yield loss, closed.detach(), vmap(module)(x)


def mapped_over_a_parameter(run: Run) -> Iterator[Any]:
    """`vmap` and `grad` called on a parameter itself."""
    weight = run.model.module.first.weight
    for x, y in run.batches():
        loss = train_step(run, x, y)
        norms = vmap(lambda row: row.square().sum())(weight)
        yield loss, norms, grad(lambda value: value.square().sum())(weight)


def functionalized(run: Run) -> Iterator[Any]:
    """`functionalize`, with parameters as arguments."""
    module = run.model.module
    for x, y in run.batches():
        loss = train_step(run, x, y)
        with torch.no_grad():
            values = functionalize(lambda p, x=x: functional_call(module, p, (x,)))(dict(module.named_parameters()))
        yield loss, values


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
    for index, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
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
    for x, y in run.batches():
        loss = train_step(run, x, y)
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
    parameters = list(run.model.parameters())
    for p in parameters:
        p.shared = False
    for index, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
        parameters[index % len(parameters)].marked_at = index
        yield loss, [sorted(vars(p).items()) for p in parameters]


def requires_grad_toggled(run: Run) -> Iterator[Any]:
    """As GANs do it: off and on again while the update is pending, without any forward between."""
    parameters = list(run.model.parameters())
    for x, y in run.batches():
        loss = train_step(run, x, y)
        for p in parameters:
            p.requires_grad_(False)
        frozen = [p.requires_grad for p in parameters]
        for p in parameters:
            p.requires_grad = True
        yield loss, frozen, [p.requires_grad for p in parameters]


def default_device(run: Run) -> Iterator[Any]:
    """`torch.set_default_device` puts a function mode around everything."""
    parameters = list(run.model.parameters())
    torch.set_default_device("cpu")
    try:
        for x, y in run.batches():
            loss = train_step(run, x, y)
            yield loss, torch.stack([p.sum() for p in parameters])
    finally:
        torch.set_default_device(None)


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


def read_in_inference_mode(run: Run) -> Iterator[Any]:
    """Norms for the log, in inference mode, from a list made before."""
    parameters = [p for p in run.model.parameters() if p.numel()]
    for x, y in run.batches():
        loss = train_step(run, x, y)
        with torch.inference_mode():
            norms = [p.norm().item() for p in parameters]
        yield loss, norms


def write_in_inference_mode(run: Run) -> Iterator[Any]:
    """Clips in inference mode, from the very first step on."""
    parameters = list(run.model.parameters())
    for x, y in run.batches():
        loss = train_step(run, x, y)
        with torch.inference_mode():
            for p in parameters:
                p.clamp_(-0.3, 0.3)
        yield loss


def print_parameters(run: Run) -> Iterator[Any]:
    """`repr`, `tolist`, `item`, formatting and comparison."""
    parameters = list(run.model.parameters())
    for x, y in run.batches():
        loss = train_step(run, x, y)
        first, last = run.model.module.first.weight, parameters[-1]
        values = last.detach().tolist()
        yield loss, values, f"{first.flatten()[0].item():.9f}", str(last.data), len(first), first.sum().item() > 0


def save_only_tensors(run: Run) -> Iterator[Any]:
    """Tensors taken by `detach`, `clone`, `cpu`, `to` and indexing; two of the five keep the memory."""
    weight = run.model.module.first.weight
    for x, y in run.batches():
        loss = train_step(run, x, y)
        taken = [weight.detach(), weight.clone(), weight.cpu(), weight.to(torch.float64), weight[1:3]]
        yield loss, snapshot(taken), torch.equal(weight, weight.clone())
