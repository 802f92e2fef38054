"""Loops that look at gradients when the next backward is about to write into DDP's buckets, in which they travel."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint

from adversarial import GRADIENTS_READ, Script, adversarial
from adversary.nets import mlp, mse

TOO_LATE = "called between a forward and its backward"
VIEWS = (False, True)


def _train(run: Script, view: bool, make: Any = SGD, net: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = run.ddp(mlp() if net is None else net, gradient_as_bucket_view=view)
    optimizer = make(model.parameters(), lr=0.05, **options)
    run.attach(model, optimizer)
    return model, optimizer


def _gradients(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


class _Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, raises: bool = False) -> torch.Tensor:
        if raises:
            raise ValueError
        return self.layer(x)


@adversarial(fallback=TOO_LATE, three=True)
def test_step_between_a_forward_and_its_backward(run: Script) -> None:
    """One layer, whose weight autograd does not need for backward: plain DDP allows it, too."""
    for view in VIEWS:
        for another_forward in ("", "without sync", "raises"):
            model, optimizer = _train(run, view, net=_Raising(), momentum=0.9)
            x, y = next(run.batches())
            mse(model(x), y).backward()
            for x, y in run.batches():
                loss = mse(model(x), y)
                if another_forward == "raises":
                    with contextlib.suppress(ValueError):
                        model(2 * x, raises=True)
                elif another_forward:
                    with model.no_sync():
                        model(2 * x)
                optimizer.step()
                optimizer.zero_grad()
                loss.backward()
                run.log(loss, model.module.layer.weight)


# Gradients are taken between a forward and its backward, and looked at when that is over.


@dataclass
class _Output:
    loss: torch.Tensor
    logits: list[torch.Tensor]


class _Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        output = self.net(x)
        return _Output(mse(output, y), [output])


class _PassingThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(x), x


def _plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model(x), y)


def _in_a_dataclass(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x, y).loss


def _autograd_has_come_to_the_output(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = mse(model(x), y)
    torch.autograd.grad(loss, x, retain_graph=True)
    return loss


def _with_a_gradient_penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = model(x)
    [slope] = torch.autograd.grad(output.sum(), x, create_graph=True)
    return mse(output, y) + slope.square().mean()


def _backward_through_an_input_that_is_returned(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = 2 * x
    output, same = model(made)
    torch.autograd.grad(same.sum(), x, retain_graph=True)
    return mse(output, y)


def _view_that_is_changed_in_place(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = model(x)
    output.mul_(0.5)
    return mse(output, y.flatten())


FORWARDS = {
    "plain": (_plain, mlp),
    "dataclass": (_in_a_dataclass, _Answering),
    "autograd_grad": (_autograd_has_come_to_the_output, mlp),
    "penalty": (_with_a_gradient_penalty, mlp),
    "returned_input": (_backward_through_an_input_that_is_returned, _PassingThrough),
    "changed_view": (_view_that_is_changed_in_place, lambda: nn.Sequential(mlp(), nn.Flatten(0))),
}


@adversarial(cases=FORWARDS, fallback="", three=True)
def test_gradients_are_taken_after_a_forward_and_read_after_the_backward(run: Script, case: Any) -> None:
    forward, net = case
    for view in VIEWS:
        model, optimizer = _train(run, view, net=net())
        for x, y in run.batches():
            loss = forward(model, x.requires_grad_(), y)
            before = _gradients(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss, None if view else before)


class _Aside(nn.Module):
    """Hides its loss from its output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = self.net(x)
        self.loss = mse(output, y)
        return output * 1  # from here no way leads to the loss


@adversarial(
    cases={"afterwards": False, "in_a_hook": True},
    refused="RuntimeError: the gradient of .* was overwritten by the backward that has begun",
)
def test_gradients_are_taken_before_a_backward_that_does_not_come_from_the_output(run: Script, case: bool) -> None:
    net = _Aside()
    model, optimizer = _train(run, False, net=net)
    held: list[Any] = []

    def read(*_: Any) -> None:
        run.log([gradient for gradient in held if gradient is not None])
        held.clear()

    if case:
        next(model.parameters()).register_post_accumulate_grad_hook(read)
    for x, y in run.batches():
        model(x, y)
        held[:] = _gradients(model)
        optimizer.zero_grad()
        net.loss.backward()
        read()
        optimizer.step()


@adversarial()
def test_backward_does_not_come_from_the_output(run: Script) -> None:
    for view in VIEWS:
        net = _Aside()
        model, optimizer = _train(run, view, Adam, net=net)
        for x, y in run.batches():
            model(x, y)
            optimizer.zero_grad()
            net.loss.backward()
            optimizer.step()
            run.log(net.loss)


# Gradients that are zeroed or moved while they travel.


@adversarial(fallback="", three=True)
def test_gradients_are_zeroed_in_place_before_and_after_step(run: Script) -> None:
    for view in VIEWS:
        model, optimizer = _train(run, view, Adam)
        for step, (x, y) in enumerate(run.batches()):
            mse(model(x), y).backward()
            if step % 4 == 2:
                optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            if step % 2:
                optimizer.zero_grad(set_to_none=False)
            else:
                for gradient in _gradients(model):
                    gradient.zero_()
            if step % 3 == 0:
                run.log(_gradients(model))
            if step % 3 == 1:
                optimizer.step()  # with zeros: only the moments move


@adversarial(fallback=GRADIENTS_READ)
def test_storage_of_one_gradient_moves_while_others_are_on_the_wire_or_wait(run: Script) -> None:
    for view in VIEWS:
        model, optimizer = _train(run, view, Adam)
        for step, (x, y) in enumerate(run.batches()):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            if step % 2:
                model.module[4].bias.grad.share_memory_()
            optimizer.step()
            if not step % 2:
                model.module[2].weight.grad.share_memory_()
            run.log(model.module[4].bias.grad)


# Forwards and backwards in another order than one after the other.


@adversarial(deferred=0, fallback="")
def test_forward_without_backward_before_step(run: Script) -> None:
    """As for a metric that somebody computes without no_grad()."""
    for view in VIEWS:
        model, optimizer = _train(run, view, Adam)
        for x, y in run.batches():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            run.log(mse(model(x), y))
            optimizer.step()


@adversarial(deferred=0, fallback="")
def test_model_is_checkpointed_as_a_whole(run: Script) -> None:
    for view in VIEWS:
        model, optimizer = _train(run, view, Adam)
        for x, y in run.batches():
            optimizer.zero_grad()
            loss = mse(checkpoint(model, x.requires_grad_(), use_reentrant=False), y)
            loss.backward()
            optimizer.step()
            run.log(loss)


@adversarial(deferred=0, fallback="", three=False)  # after detach, gloo adds three numbers in its own order
def test_a_forward_without_sync_comes_between_a_forward_and_detach(run: Script) -> None:
    model, optimizer = _train(run, False)
    for x, y in run.batches():
        mse(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = mse(model(x), y)
    with model.no_sync():
        model(2 * x)
    run.detach()
    loss.backward()
    run.log(_gradients(model))


@adversarial(deferred=0, fallback="")
def test_two_forwards_and_a_step_between_their_backwards(run: Script) -> None:
    for view in VIEWS:
        model, optimizer = _train(run, view, net=nn.Linear(8, 4), momentum=0.9)
        for index, (x, y) in enumerate(run.batches()):
            one, other = mse(model(x), y), mse(model(2 * x), y)
            one.backward()
            optimizer.step()
            other.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=index % 2 == 0)
            run.log(one, other, model.module.weight)


@adversarial(deferred=0, fallback="")
def test_one_graph_twice_and_a_step_between(run: Script) -> None:
    for view in VIEWS:
        model, optimizer = _train(run, view, net=nn.Linear(8, 4), momentum=0.9)
        for index, (x, y) in enumerate(run.batches()):
            loss = mse(model(x), y)
            loss.backward(retain_graph=True)
            if index % 2:
                optimizer.step()
            if index % 3 == 0:
                optimizer.zero_grad(set_to_none=index % 2 == 0)
            loss.backward()
            optimizer.step()
            if index % 4 == 0:
                optimizer.zero_grad(set_to_none=False)
            run.log(loss, _gradients(model) if index % 5 == 0 else None)


ALARM_AFTER_S = 0.0037


@adversarial(deferred=0, fallback="")
def test_a_signal_handler_reads_gradients_at_any_time(run: Script) -> None:
    for view in VIEWS:
        model, optimizer = _train(run, view, Adam)

        def read(*_: Any, model: nn.Module = model) -> None:
            for gradient in _gradients(model):
                if gradient is not None:
                    gradient.sum().item()
            # Only now: on a busy machine a timer that repeats would interrupt its own handler, again and again.
            signal.setitimer(signal.ITIMER_REAL, ALARM_AFTER_S)

        before = signal.signal(signal.SIGALRM, read)
        signal.setitimer(signal.ITIMER_REAL, ALARM_AFTER_S)
        try:
            for index, (x, y) in enumerate(run.batches(60)):
                optimizer.zero_grad(set_to_none=index % 2 == 0)
                mse(model(x), y).backward()
                optimizer.step()
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # a handler that runs just now would set the timer again
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


# Buckets that DDP leaves out.


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.again = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.uses_one = self.uses_other = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.uses_one:
            x = x + self.again(self.one(x))
        if self.uses_other:
            x = x + self.other(x)
        return self.last(x)


SKIPPING = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.0003}
ZEROED: dict[str, Callable[[int], bool]] = {"to_none": lambda index: True, "in_place": lambda index: bool(index % 2)}


@adversarial(cases=ZEROED, deferred=0, fallback="")
def test_buckets_are_skipped(run: Script, case: Callable[[int], bool]) -> None:
    """Groups span buckets, of which DDP leaves out those of branches that no rank has used."""
    for view in VIEWS:
        net = _Branches()
        model = run.ddp(net, gradient_as_bucket_view=view, **SKIPPING)
        optimizer = Adam(model.parameters(), lr=0.05)
        run.attach(model, optimizer, fusion_mb=2e-3)
        for index, (x, y) in enumerate(run.batches()):
            net.uses_one, net.uses_other = index < 6 or index % 3 != 2, index < 6 or index % 4 != 1
            optimizer.zero_grad(set_to_none=case(index))
            mse(model(x), y).backward()
            optimizer.step()
            if index % 4 == 3:
                run.log(_gradients(model))
