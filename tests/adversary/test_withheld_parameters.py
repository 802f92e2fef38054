"""Odd parameters, and scripts that hold on to them, swap them, freeze them: the second half."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adversary.nets import mlp, mse, train_step
from adversary.script import ALIASED, PAST_EVERYTHING, Script, adversarial


@adversarial()
def test_attributes_on_parameters_are_set_and_read_after_step(run: Script) -> None:
    net = mlp()
    for index, p in enumerate(net.parameters()):
        p.no_decay = p.ndim < 2
        p.index = index
    model, optimizer = run.train(net, SGD, lr=0.1)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        for p in net.parameters():
            run.log(p.no_decay, p.index, getattr(p, "seen", None), hasattr(p, "other"))
            p.seen = step
        del net[2].weight.seen


@adversarial()
def test_modules_and_parameters_are_copied_in_all_ways(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        p = net[2].weight
        run.log(copy.deepcopy(p), nn.Parameter(p), nn.Parameter(p.data.clone()), p.clone(), p.new_tensor(1.0))
        run.log(type(p)(p.data.clone()), copy.deepcopy(net)(x), torch.empty_like(p).copy_(p))
        run.log(nn.utils.parameters_to_vector([copy.copy(p)]), p.double(), p.to(torch.bfloat16), +p, p.cpu())


@adversarial()
def test_memory_is_read_through_a_fresh_address(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        for p in net.parameters():
            run.log(ctypes.string_at(p.data_ptr(), p.numel() * 4))
            run.log(bytes(p.untyped_storage().tolist()))


@adversarial(needs=("safetensors",))
def test_safetensors_after_step(run: Script) -> None:
    import safetensors.torch

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log(safetensors.torch.save(dict(net.named_parameters())), safetensors.torch.save(net.state_dict()))


@adversarial()
def test_digest_of_the_weights_is_compared_between_ranks(run: Script) -> None:
    import hashlib

    import torch.distributed as dist

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        digest = hashlib.sha256(b"".join(memoryview(p.detach().numpy()).tobytes() for p in net.parameters()))
        everywhere: list[Any] = [None] * run.world_size
        dist.all_gather_object(everywhere, digest.hexdigest())
        run.log(everywhere)


@adversarial()
def test_dlpack_and_buffers_of_python_after_step(run: Script) -> None:
    import numpy as np

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log(np.from_dlpack(net[0].weight.detach()).copy(), torch.from_dlpack(net[2].weight.detach()).clone())
        run.log(np.array(net[4].weight.tolist()), np.asarray(net[4].bias.data).copy())


@adversarial()
def test_all_tensors_that_the_collector_knows(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            ids = {id(p) for p in net.parameters()}
            # Not isinstance: it asks objects for their class, and a dead proxy of another library raises.
            parameters = [o for o in gc.get_objects() if issubclass(type(o), nn.Parameter)]
            run.log(sum(id(o) in ids for o in parameters))
            run.log(sum(p.norm().item() for p in net.parameters()))


@adversarial()
def test_functools_caches_and_dispatch_on_parameters(run: Script) -> None:
    @functools.singledispatch
    def describe(value: Any) -> str:
        return "something"

    @describe.register
    def _(value: nn.Parameter) -> str:
        return f"parameter of {value.sum().item()!r}"

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    total = functools.partial(functools.reduce, lambda a, p: a + p.pow(2).sum(), tuple(net.parameters()))
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log([describe(p) for p in net.parameters()], total(torch.tensor(0.0)))
        match net[0].weight:
            case nn.Parameter(shape=shape):
                run.log(tuple(shape))


@adversarial(fallback="")
def test_module_is_cast_to_double_and_back(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for step, (x, y) in enumerate(run.batches(12)):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            net.double()
            run.log(net(x.double()))
            net.float()


@adversarial(fallback="")
def test_weights_move_to_shared_memory_in_mid_run(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for step, (x, y) in enumerate(run.batches(12)):
        run.log(train_step(model, optimizer, x, y))
        if step == 6:
            net.share_memory()


@adversarial()
def test_two_layers_exchange_their_weights(run: Script) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model, optimizer = run.train(net, Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches(12)):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            net[0].weight, net[2].weight = net[2].weight, net[0].weight
        if step % 4 == 1:
            net[0].bias.data, net[2].bias.data = net[2].bias.data, net[0].bias.data
        run.log(net(x))


@adversarial()
def test_submodules_are_reordered_and_called_alone(run: Script) -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model, optimizer = run.train(net, Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches(12, outputs=8)):
        train_step(model, optimizer, x, y)
        if step == 6:
            net[0], net[3] = net[3], net[0]
        with torch.no_grad():
            run.log(net[step % 4](x), net.get_parameter("1.weight").sum(), net.get_submodule("2").bias)


@adversarial(fallback="")
def test_tie_is_made_in_mid_run_by_data(run: Script) -> None:
    """Two parameters come to share memory while they train."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model, optimizer = run.train(net, SGD, lr=0.05)
    for step, (x, y) in enumerate(run.batches(14)):
        run.log(train_step(model, optimizer, x, y))
        if step == 6:
            net[2].weight.data = net[0].weight.data


@adversarial(fallback="")
def test_parameters_are_slices_of_one_that_is_registered(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.randn(8 * 8 + 8 + 8 * 4) * 0.3)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w, b, v = self.flat.split([64, 8, 32])
            return (torch.tanh(x @ w.view(8, 8) + b) @ v.view(8, 4)) * self.scale

    net = Net()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        with torch.no_grad():
            net.flat.view(-1)[:64].view(8, 8).fill_diagonal_(0.1)


@adversarial(fallback="")
def test_buffer_is_a_view_of_a_parameter(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
            self.register_buffer("mirror", self.layer.weight.data[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(x) + self.mirror)

    model, optimizer = run.train(Net(), SGD, lr=0.1)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y), model.module.mirror)


@adversarial(fallback=ALIASED)
def test_state_dict_is_kept_and_read_later(run: Script) -> None:
    """The tensors of a state dict are the live ones."""
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    live = model.state_dict()
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log({k: v.norm() for k, v in live.items()})


@adversarial()
def test_freeze_by_grad_none_and_requires_grad_of_single_tensors(run: Script) -> None:
    net = mlp()
    model = run.ddp(net, find_unused_parameters=True)
    optimizer = AdamW(model.parameters(), lr=0.03)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches(14)):
        net[0].weight.requires_grad = step % 3 != 0
        net[2].bias.requires_grad_(step % 4 != 1)
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_parameters_under_modes_devices_and_default_types(run: Script) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.calls += 1
            return f(*args, **(kwargs or {}))

    class Pass(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"), Count(), Pass(), torch.no_grad():
                run.log(net[0].weight.sum(), net[4].bias.mean())
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            run.log(net(x))


@adversarial(refused=PAST_EVERYTHING, strict=False)
def test_reads_past_torch_functions_of_subclasses(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            run.log([p.sum() for p in net.parameters()])
        run.log(mse(net(x), y))
