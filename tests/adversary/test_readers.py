"""Whoever looks: loggers, hooks, threads, collectives by hand, evaluation."""

from __future__ import annotations

import copy
import io
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adversarial import PAST_EVERYTHING, Script, adversarial
from adversary.nets import mlp, mse, train_step


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
        for x, y in run.batches(10):
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
    for step, (x, y) in enumerate(run.batches()):
        handle = net[2].weight.register_hook(lambda g, s=step: g * (1 + s % 3))
        train_step(model, optimizer, x, y)
        handle.remove()


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


@adversarial()
def test_periodic_model_averager_of_torch(run: Script) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    averager = PeriodicModelAverager(period=2, warmup_steps=3)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        averager.average_parameters(model.parameters())


# Rank 0 keeps the state dict, whose tensors are the live ones.
@adversarial(fallback="")
def test_objects_with_weights_are_broadcast(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 3 == 1:
            box = [model.module.state_dict() if run.rank == 0 else None]
            dist.broadcast_object_list(box, 0)
            model.module.load_state_dict(box[0])


@adversarial()
def test_asynchronous_reduction_of_parameters_during_forward(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        copies = [p.detach().clone() for p in net.parameters()]
        works = [dist.all_reduce(c, async_op=True) for c in copies]
        with torch.no_grad():
            run.log(net(x))
        for work in works:
            work.wait()
        run.log(copies)


@adversarial()
def test_weights_go_through_a_queue_to_a_thread(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    inbox: queue.Queue[Any] = queue.Queue()
    sums: list[float] = []

    def consume() -> None:
        while (item := inbox.get()) is not None:
            sums.append(sum(p.double().sum().item() for p in item))

    thread = threading.Thread(target=consume)
    thread.start()
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        inbox.put([p.detach().clone() for p in net.parameters()])
    inbox.put(None)
    thread.join()
    run.log(sums)


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
def test_global_module_hooks_watch_everything(run: Script) -> None:
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    members = set(net.modules())
    handles = [
        register_module_forward_pre_hook(
            lambda m, _: run.log([p.sum() for p in m.parameters(False)]) if m in members else None
        ),
        register_module_forward_hook(lambda m, _, out: run.log(out.std()) if m in members else None),
    ]
    try:
        for x, y in run.batches(10):
            train_step(model, optimizer, x, y)
    finally:
        for handle in handles:
            handle.remove()


@adversarial()
def test_backward_hooks_read_and_scale_the_weights_of_other_layers(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    norms: list[torch.Tensor] = []
    net[2].register_full_backward_hook(lambda m, gi, go: norms.append(net[4].weight.norm().detach()))
    net[0].register_full_backward_pre_hook(lambda m, go: (go[0] * (1 + 0.01 * net[4].bias.detach().sum()),))
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
    run.log(norms)


@adversarial()
def test_weights_of_a_frozen_head_are_recomputed_from_a_trained_trunk(run: Script) -> None:
    """A buffer is set by hand from parameters before each forward: a classifier made of class means."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = mlp()
            self.register_buffer("means", torch.zeros(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.trunk(x) @ self.means

    model, optimizer = run.train(Net(), Adam, lr=0.03)
    for x, y in run.batches():
        net = model.module
        net.means = net.trunk[4].weight.detach()[:, :4] + torch.eye(4)
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_profiler_and_torch_function_logging(run: Script) -> None:
    from torch.overrides import TorchFunctionMode

    class Names(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        if step == 5:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                run.log(train_step(model, optimizer, x, y))
        else:
            with Names():
                run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_inputs_are_tensors_of_a_subclass(run: Script) -> None:
    class Tagged(torch.Tensor):
        """Leaves torch functions of subclasses aside, as image types of torchvision do."""

        @classmethod
        def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return f(*args, **(kwargs or {}))

    model = run.ddp(mlp())
    optimizer = Adam(model.parameters(), lr=0.03)
    run.attach(model, optimizer)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x.as_subclass(Tagged), y))


@adversarial(needs=("torchvision",))
def test_inputs_are_images_of_torchvision(run: Script) -> None:
    from torchvision import tv_tensors

    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4))
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, tv_tensors.Image(x.view(-1, 1, 2, 4)), y))


@adversarial()
def test_whole_model_is_pickled_and_evaluated(run: Script) -> None:
    import pickle

    model, optimizer = run.train(nn.Sequential(mlp(), nn.BatchNorm1d(4)), AdamW, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 3 == 2:
            clone = pickle.loads(pickle.dumps(model.module)).eval()
            run.log(clone(x))
            file = io.BytesIO()
            torch.save((list(model.module.parameters()), optimizer.state_dict()), file)
            file.seek(0)
            run.log(torch.load(file, weights_only=False)[0])


@adversarial()
def test_quantized_copy_is_evaluated(run: Script) -> None:
    import warnings

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scripted = torch.jit.trace(copy.deepcopy(net), x)
            run.log(scripted(x))
