"""Whoever looks: loggers, hooks, threads, process groups."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

from adversarial import PAST_EVERYTHING, Script, adversarial
from adversary.nets import mlp, mse, train_step


@adversarial(refused=PAST_EVERYTHING, three=True, strict=False)
def test_process_group_methods_take_parameters_directly(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    group = dist.group.WORLD
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        group.broadcast(net[0].weight, 0).wait()
        outputs = [[torch.zeros(16, 16) for _ in range(run.world_size)]]
        group.allgather(outputs, [net[2].weight]).wait()
        run.log(outputs)


@adversarial()
def test_item_tolist_format_and_iteration(run: Script) -> None:
    net = nn.Sequential(mlp(), nn.PReLU())
    model, optimizer = run.train(net, Adam, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        slope = net[1].weight
        run.log(
            slope.item(), slope.tolist(), f"{slope.item():.9f}", f"{slope}", repr(slope), bool(slope > 0.2), len(slope)
        )
        run.log([row.sum() for row in net[0][4].weight], float(slope), int(slope * 1000), 0.2 in slope)


@adversarial()
def test_forward_hooks_log_weights_of_their_module(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for layer in net:
        layer.register_forward_pre_hook(lambda m, _: run.log([p.norm() for p in m.parameters()]))
        layer.register_forward_hook(lambda m, _, out: run.log(out.mean()))
        layer.register_full_backward_hook(lambda m, gi, go: run.log(go[0].norm(), [p.norm() for p in m.parameters()]))
    for x, y in run.batches():
        train_step(model, optimizer, x, y)


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
    norms: list[Any] = []
    net[2].weight.register_post_accumulate_grad_hook(lambda p: norms.append(tuple(p.grad.shape)))
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
    run.log(norms)


@adversarial()
def test_grad_hooks_come_and_go_while_updates_are_pending(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.5)
    for step, (x, y) in enumerate(run.batches()):
        handle = net[2].weight.register_hook(lambda g, s=step: g * (1 + s % 3))
        train_step(model, optimizer, x, y)
        handle.remove()


@adversarial()
def test_thread_writes_weights_between_two_barriers(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)

    def clip() -> None:
        with torch.no_grad():
            for p in net.parameters():
                p.clamp_(-0.3, 0.3)

    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        thread = threading.Thread(target=clip)
        thread.start()
        thread.join()


@adversarial()
def test_forward_runs_in_another_thread(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for x, y in run.batches():
        optimizer.zero_grad()
        box: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda x=x, y=y, box=box: box.append(mse(model(x), y)))
        thread.start()
        thread.join()
        box[0].backward()
        optimizer.step()
        run.log(box)


@adversarial()
def test_step_runs_in_another_thread(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        run.log(loss)


@adversarial(fallback="")
def test_backward_runs_in_another_thread(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_inputs_are_tensors_of_a_subclass(run: Script) -> None:
    class Tagged(torch.Tensor):
        """Leaves torch functions of subclasses aside, as image types of torchvision do."""

        @classmethod
        def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return f(*args, **(kwargs or {}))

    # First a function written in Python: torch looks at the input alone before it calls the input's class.
    model = run.ddp(nn.Sequential(nn.LayerNorm(8), mlp()))
    optimizer = Adam(model.parameters(), lr=0.03)
    run.attach(model, optimizer)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x.as_subclass(Tagged), y))
