"""Hooks, threads and tensor classes of the script, around parameters and gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam

from adversarial import Script, adversarial
from adversary.nets import fit, mlp, mse, train_step


@adversarial()
def test_forward_and_backward_hooks_log_weights_of_their_module(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for layer in net:
        layer.register_forward_pre_hook(lambda m, _: run.log([p.norm() for p in m.parameters()]))
        layer.register_forward_hook(lambda m, _, out: run.log(out.mean()))
        layer.register_full_backward_hook(lambda m, gi, go: run.log(go[0].norm(), [p.norm() for p in m.parameters()]))
    fit(run, model, optimizer)


@adversarial()
def test_hooks_on_tensors_and_on_the_ddp_itself(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    model.register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))
    model.register_forward_hook(lambda m, a, out: out + 1)
    for x, y in run.batches():
        optimizer.zero_grad()
        out = model(x)
        out.register_hook(lambda g: g.clamp(-0.1, 0.1))
        mse(out, y).backward()
        optimizer.step()


@adversarial(fallback="")
def test_post_accumulate_hooks_that_come_after_attach(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    net[2].weight.register_post_accumulate_grad_hook(lambda p: run.log(tuple(p.grad.shape)))
    fit(run, model, optimizer)


@adversarial()
def test_grad_hooks_come_and_go_while_updates_are_pending(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.5)
    for step, (x, y) in enumerate(run.batches()):
        handle = net[2].weight.register_hook(lambda g, s=step: g * (1 + s % 3))
        train_step(model, optimizer, x, y)
        handle.remove()


def in_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join()
    return results[0]


@adversarial()
def test_forward_step_and_writes_in_other_threads(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)

    def clamp() -> None:
        with torch.no_grad():
            for p in net.parameters():
                p.clamp_(-0.3, 0.3)

    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(in_a_thread(model, x), y)
        loss.backward()
        in_a_thread(optimizer.step)
        in_a_thread(clamp)
        run.log(loss)


@adversarial(fallback="")
def test_backward_runs_in_another_thread(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        in_a_thread(loss.backward)
        optimizer.step()
        run.log(loss)


class Tagged(torch.Tensor):
    """Leaves torch functions of subclasses aside, as image types of torchvision do."""

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return f(*args, **(kwargs or {}))


@adversarial()
def test_inputs_are_tensors_of_a_subclass(run: Script) -> None:
    # First a function written in Python: torch looks at the input alone before it calls the input's class.
    model, optimizer = run.train(nn.Sequential(nn.LayerNorm(8), mlp()), Adam, lr=0.03)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x.as_subclass(Tagged), y))
