"""Whoever looks: loggers, hooks, threads, collectives by hand, evaluation."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adversary.nets import mlp, mse, train_step
from adversary.script import ALIASED, GRADIENTS_READ, PAST_EVERYTHING, Script, adversarial


# A thread of gloo may hold a tensor a little longer than the call, so that single updates are not deferred.
@adversarial(three=True, deferred=5, fallback="")
def test_broadcast_of_parameters_by_hand_after_each_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        for p in model.parameters():
            dist.broadcast(p.data, 0)


@adversarial(three=True)
def test_collectives_take_the_parameter_itself(run: Script) -> None:
    """No `.data`, no `detach()`: the process group gets the object."""
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with torch.no_grad():
            dist.all_reduce(net[0].weight)
            net[0].weight.div_(run.world_size)
            gathered = [torch.empty_like(net[2].weight.data) for _ in range(run.world_size)]
        dist.all_gather(gathered, net[2].weight)
        run.log(gathered)


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


@adversarial(refused=PAST_EVERYTHING)
def test_coalesced_broadcast_as_ddp_itself_does_it(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with torch.no_grad():
            dist._broadcast_coalesced(dist.group.WORLD, list(net.parameters()), 1 << 20, 0)


@adversarial()
def test_send_of_a_parameter_to_the_other_rank(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        got = torch.empty(4, 16)
        if run.rank == 0:
            dist.send(net[4].weight, 1)
        else:
            dist.recv(got, 0)
            run.log(got)


@adversarial()
def test_histograms_by_numpy(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 2:
            for p in net.parameters():
                counts, _ = np.histogram(p.detach().cpu().numpy(), bins=5)
                run.log(counts, np.asarray(p.data).std())


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
def test_thread_logs_norms_all_the_time(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    stop, errors = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            try:
                with torch.no_grad():
                    [p.norm().item() for p in net.parameters()]
            except Exception as error:
                errors.append(repr(error))
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for x, y in run.batches():
            run.log(train_step(model, optimizer, x, y))
    finally:
        stop.set()
        thread.join()
    run.log(errors)


@adversarial()
def test_checkpoints_are_copied_in_a_pool_of_threads(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.05)
    with ThreadPoolExecutor(1) as pool:
        for x, y in run.batches():
            train_step(model, optimizer, x, y)
            future = pool.submit(lambda: copy.deepcopy((model.module.state_dict(), optimizer.state_dict())))
            run.log(*future.result())


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
    for step, (x, y) in enumerate(run.batches(12)):
        handle = net[2].weight.register_hook(lambda g, s=step: g * (1 + s % 3))
        train_step(model, optimizer, x, y)
        handle.remove()


@adversarial(fallback=GRADIENTS_READ)
def test_gradient_norms_are_logged_each_third_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), AdamW, lr=0.05)
    for step, (x, y) in enumerate(run.batches(12)):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        if step % 3 == 0:
            run.log({n: p.grad.norm() for n, p in model.named_parameters()})
        optimizer.step()


@adversarial()
def test_evaluation_under_inference_mode_through_the_ddp(run: Script) -> None:
    model, optimizer = run.train(nn.Sequential(mlp(), nn.BatchNorm1d(4)), SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        model.eval()
        with torch.inference_mode():
            run.log(model(x))
        model.train()


@adversarial()
def test_state_dict_of_everything_each_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log(model.state_dict(), optimizer.state_dict())


@adversarial(fallback=ALIASED)
def test_views_of_parameters_are_kept_from_the_beginning(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    rows = [p.data[0] for p in net.parameters()]
    arrays = [p.detach().numpy() for p in net.parameters()]
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log(rows, arrays)


@adversarial()
def test_functional_call_and_vmapped_ensemble_of_snapshots(run: Script) -> None:
    from torch.func import functional_call, grad, stack_module_state, vmap

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    snapshots = [copy.deepcopy(net)]
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        run.log(functional_call(net, dict(net.named_parameters()), (x,)))
        per_sample = vmap(grad(lambda w, a, b: mse(functional_call(net, w, (a,)), b)), (None, 0, 0))
        run.log(per_sample(dict(net.named_parameters()), x, y))
        if step % 4 == 3:
            snapshots.append(copy.deepcopy(net))
            params, buffers = stack_module_state(snapshots)
            run.log(vmap(lambda p, b, x=x: functional_call(snapshots[0], (p, b), (x,)))(params, buffers))
