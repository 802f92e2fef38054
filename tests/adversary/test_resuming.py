"""Rollbacks, exceptions that a script lives through, models that grow."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim import SGD, Adam

from adversarial import ALIASED, Script, adversarial
from adversary.nets import mlp, mse, train_step


@adversarial()
def test_bad_batch_is_noticed_between_forward_and_backward(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches(14)):
        loss = mse(model(x), y)
        if step % 4 == 3:
            del loss
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@adversarial()
def test_exception_in_a_closure_of_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(run.batches(14)):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y, step: int = step) -> torch.Tensor:
            if step % 4 == 3:
                raise ValueError("bad batch")
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss

        try:
            run.log(optimizer.step(closure))
        except ValueError:
            run.log([p.norm() for p in model.parameters()])


@adversarial()
def test_exception_in_a_step_post_hook(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    count = 0

    def check(*_: object) -> None:
        nonlocal count
        count += 1
        if count % 4 == 0:
            raise StopIteration("tell somebody")

    optimizer.register_step_post_hook(check)
    for x, y in run.batches(14):
        try:
            train_step(model, optimizer, x, y)
        except StopIteration:
            run.log([p.sum() for p in model.parameters()])


@adversarial(fallback=ALIASED)
def test_model_grows_and_is_wrapped_again_without_a_detach(run: Script) -> None:
    """Progressive growing: the old DDP and the old optimizer are just dropped."""
    net = nn.Sequential(mlp(), nn.Linear(4, 4))
    model, optimizer = run.train(net, Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
    net.append(nn.Linear(4, 4))
    del model, optimizer
    model, optimizer = run.train(net, Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_rollback_between_backward_and_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    kept = copy.deepcopy(model.module.state_dict())
    for step, (x, y) in enumerate(run.batches(12)):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        if step % 4 == 3:
            model.module.load_state_dict(kept)
        optimizer.step()
        if step == 5:
            kept = copy.deepcopy(model.module.state_dict())


@adversarial()
def test_exception_inside_of_no_sync(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(run.batches(14)):
        try:
            with model.no_sync():
                (mse(model(x), y) / 2).backward()
                if step % 4 == 3:
                    raise KeyError("bad sample")
        except KeyError:
            optimizer.zero_grad()
            continue
        (mse(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


@adversarial()
def test_exception_in_a_forward_hook_of_evaluation(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    for x, y in run.batches(10):
        train_step(model, optimizer, x, y)
        handle = net[2].register_forward_hook(stop)  # features are cut out by an exception
        try:
            with torch.no_grad():
                net(x)
        except Stop:
            pass
        handle.remove()


@adversarial()
def test_head_is_replaced_and_everything_built_again(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches(8):
        train_step(model, optimizer, x, y)
    run.detach()
    torch.manual_seed(77)
    net[4] = nn.Linear(16, 2)
    net[0].requires_grad_(False)
    model = run.ddp(net)
    optimizer = SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    run.attach(model, optimizer)
    for x, y in run.batches(10, outputs=2):
        run.log(train_step(model, optimizer, x, y))


@adversarial(deferred=3, fallback="")
def test_optimizer_is_made_anew_each_epoch_without_telling(run: Script) -> None:
    """The attached optimizer is forgotten; another one steps the same parameters."""
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for epoch in range(3):
        for x, y in run.batches(6):
            run.log(train_step(model, optimizer, x, y))
        optimizer = SGD(model.parameters(), lr=0.05 / (epoch + 1), momentum=0.9)
