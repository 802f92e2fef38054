"""Loops that look at gradients when the next backward is about to write into DDP's buckets, in which they travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint

from adversary.nets import mlp, mse
from adversary.script import GRADIENTS_READ, Script, adversarial

TOO_LATE = "called between a forward and its backward"
VIEWS = (False, True)


def _train(run: Script, view: bool, make: Any = SGD, net: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = run.ddp(mlp() if net is None else net, gradient_as_bucket_view=view)
    optimizer = make(model.parameters(), lr=0.05, **options)
    run.attach(model, optimizer)
    return model, optimizer


@adversarial(fallback=TOO_LATE, three=True)
def test_step_between_a_forward_and_its_backward(run: Script) -> None:
    """One layer, whose weight autograd does not need for backward: plain DDP allows it, too."""
    for view in VIEWS:
        model, optimizer = _train(run, view, net=nn.Linear(8, 4), momentum=0.9)
        x, y = next(run.batches())
        mse(model(x), y).backward()
        for x, y in run.batches():
            loss = mse(model(x), y)
            optimizer.step()
            optimizer.zero_grad()
            loss.backward()
            run.log(loss, model.module.weight)


@adversarial(fallback="", three=True)
def test_gradients_are_taken_after_a_forward_and_read_after_the_backward(run: Script) -> None:
    model, optimizer = _train(run, False)
    for x, y in run.batches():
        loss = mse(model(x), y)
        before = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(before)


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


@adversarial(fallback="")
def test_gradients_are_taken_after_a_forward_that_returns_a_dataclass(run: Script) -> None:
    model, optimizer = _train(run, False, net=_Answering())
    for x, y in run.batches():
        output = model(x, y)
        before = [p.grad for p in model.parameters()]
        optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        optimizer.step()
        run.log(before)


class _Aside(nn.Module):
    """Hides its loss from its output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = self.net(x)
        self.loss = mse(output, y)
        return output * 1  # from here no way leads to the loss


@adversarial(refused="RuntimeError: the gradient of .* was overwritten by the backward that has begun")
def test_gradients_are_taken_before_a_backward_that_does_not_come_from_the_output(run: Script) -> None:
    net = _Aside()
    model, optimizer = _train(run, False, net=net)
    for x, y in run.batches():
        model(x, y)
        before = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        net.loss.backward()
        optimizer.step()
        run.log(before)


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


@adversarial(fallback="", three=True)
def test_gradients_are_zeroed_in_place_after_step_and_read(run: Script) -> None:
    for view in VIEWS:
        model, optimizer = _train(run, view, Adam)
        for step, (x, y) in enumerate(run.batches()):
            mse(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if step % 3 == 0:
                run.log([p.grad for p in model.parameters()])
            if step % 3 == 1:
                optimizer.step()  # with zeros: only the moments move


@adversarial(fallback="")
def test_gradients_are_zeroed_in_place_before_step(run: Script) -> None:
    for view in VIEWS:
        model, optimizer = _train(run, view, Adam)
        for x, y in run.batches():
            mse(model(x), y).backward()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()


@adversarial(fallback="")
def test_a_gradient_is_zeroed_by_hand_and_held_over_a_backward(run: Script) -> None:
    for view in VIEWS:
        model, optimizer = _train(run, view)
        for x, y in run.batches():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
            held = model.module[0].weight.grad
            held.zero_()
            optimizer.zero_grad()
            run.log(model(x))
            if not view:
                run.log(held)
            del held


@adversarial(fallback=GRADIENTS_READ)
def test_storage_of_one_gradient_moves_while_others_are_on_the_wire(run: Script) -> None:
    for view in VIEWS:
        model, optimizer = _train(run, view)
        for x, y in run.batches():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            model.module[4].bias.grad.share_memory_()
            optimizer.step()
            run.log(model.module[4].bias.grad)


@adversarial(fallback="")
def test_storage_of_one_gradient_moves_while_updates_wait(run: Script) -> None:
    for view in VIEWS:
        model, optimizer = _train(run, view, Adam)
        for x, y in run.batches():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
            model.module[2].weight.grad.share_memory_()


@adversarial(fallback="")
def test_gradients_are_edited_after_step(run: Script) -> None:
    for view in VIEWS:
        model, optimizer = _train(run, view, Adam)
        for x, y in run.batches():
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
            for p in model.parameters():
                p.grad.mul_(100)  # comes too late for the step
            run.log([p.grad for p in model.parameters()])


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
