"""Odd parameters, and scripts that hold on to them, swap them, freeze them."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adversarial import ALIASED, PAST_EVERYTHING, Script, adversarial
from adversary.nets import mlp, mse, train_step


class Odd(nn.Module):
    """Scalars, empty, transposed and very small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(16, 8).t())
        self.ones = nn.ParameterList(nn.Parameter(torch.full((1,), float(i))) for i in range(5))
        self.named = nn.ParameterDict({"in": nn.Parameter(torch.zeros(16)), "out": nn.Parameter(torch.zeros(4))})
        self.head = nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.turned + self.named["in"] + sum(self.ones)
        return self.head(h.tanh()) / self.temperature + self.named["out"] + self.nothing.sum()


@adversarial()
def test_hundreds_of_tiny_parameters(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.randn(2)) for _ in range(200))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([(x[:, :2] * s).sum(1) for s in self.scales], 1)[:, :4] + sum(
                s.sum() for s in self.scales
            )

    model = run.ddp(Net())
    optimizer = Adam(model.parameters(), lr=0.01)
    run.attach(model, optimizer, fusion_mb=1e-3)
    for x, y in run.batches(8):
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_master_weights_in_fp32_for_a_bf16_model(run: Script) -> None:
    """Copies to and fro, as before autocast: the optimizer has the masters, the model is stepped by hand."""
    net = mlp().bfloat16()
    model = run.ddp(net)
    optimizer = SGD(model.parameters(), lr=0.0)
    run.attach(model, optimizer)
    masters = [p.detach().float().clone() for p in net.parameters()]
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x.bfloat16()), y.bfloat16()).backward()
        optimizer.step()
        for master, p in zip(masters, net.parameters(), strict=True):
            master.sub_(p.grad.float(), alpha=0.1)
            p.data.copy_(master)
    run.log(masters)


@adversarial()
def test_progressive_unfreezing_from_the_head_down(run: Script) -> None:
    net = mlp()
    model = run.ddp(net, find_unused_parameters=True)
    optimizer = AdamW(model.parameters(), lr=0.03, weight_decay=0.1)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches(15)):
        for depth, layer in enumerate((4, 2, 0)):
            net[layer].requires_grad_(step // 4 >= depth)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial(fallback=ALIASED)
def test_one_flat_tensor_holds_all_weights(run: Script) -> None:
    """As apex and old fp16 wrappers lay out parameters: views of one buffer, which the script reads."""
    net = mlp()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    offset = 0
    for p in net.parameters():
        p.data = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    model, optimizer = run.train(net, Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y), flat.norm())
        flat.mul_(0.99)


@adversarial()
def test_generators_of_parameters_are_held_for_long(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    held = net.named_parameters()
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        pair = next(held, None)
        if pair is not None:
            run.log(pair[0], pair[1])


@adversarial()
def test_parameters_are_keys_of_dicts_and_members_of_sets(run: Script) -> None:
    import weakref

    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    names = {p: n for n, p in net.named_parameters()}
    refs = [weakref.ref(p) for p in net.parameters()]
    seen = weakref.WeakSet()
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log([names[p] for p in optimizer.param_groups[0]["params"]])
        run.log([r() is p for r, p in zip(refs, net.parameters(), strict=True)])
        run.log(sorted(names[p] for p in set(net.parameters())))
        for p in net.parameters():
            run.log(any(p is q for q in net.parameters()), p in names)
    run.log(len(seen))


@adversarial()
def test_types_and_flags_of_parameters_after_step(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log([isinstance(p, nn.Parameter) for p in net.parameters()])
        run.log([(p.is_leaf, p.requires_grad, p.grad_fn, p.device, p.layout, p.is_sparse) for p in net.parameters()])
        run.log([(p.type(), p.element_size(), p.is_contiguous(), tuple(p.stride())) for p in net.parameters()])
        run.log(sum(p.numel() for p in net.parameters()))


@pytest.mark.xfail(strict=True, reason="type(p) is nn.Parameter is False while an update is pending")
@adversarial()
def test_exact_type_of_parameters_after_step(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        run.log([type(p) is nn.Parameter for p in net.parameters()])


@adversarial()
def test_versions_of_parameters_grow_with_each_step(run: Script) -> None:
    """A cache that is keyed by `_version`."""
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    cache: dict[int, tuple[int, torch.Tensor]] = {}
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        for index, p in enumerate(net.parameters()):
            if cache.get(index, (None,))[0] != p._version:
                cache[index] = (p._version, p.detach().norm())
        run.log([norm for _, norm in cache.values()])


@adversarial()
def test_initialization_is_done_again_in_mid_run(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if step == 6:
            torch.manual_seed(8)
            net[2].reset_parameters()
            nn.init.trunc_normal_(net[4].weight, std=0.1)
            nn.init.zeros_(net[4].bias)


@adversarial()
def test_dead_units_are_recycled_by_index(run: Script) -> None:
    """As ReDo and neuron resampling of sparse autoencoders do it."""
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            with torch.no_grad():
                dead = net[2].weight.abs().sum(1).argsort()[:3]
                net[2].weight[dead] = net[2].weight.mean(0)
                net[2].bias[dead] = 0.0
                net[4].weight[:, dead] *= 0.1
                optimizer.state[net[2].weight]["exp_avg"][dead] = 0.0


@adversarial(fallback="")
def test_tie_by_data_from_the_start(run: Script) -> None:
    """Two parameters, one memory: the optimizer adds both updates to it."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    net[2].weight.data = net[0].weight.data
    model, optimizer = run.train(net, SGD, lr=0.05)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial(fallback="", three=True)
def test_tie_by_data_is_cut_and_made_again(run: Script) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model, optimizer = run.train(net, SGD, lr=0.05)
    for step, (x, y) in enumerate(run.batches(16)):
        run.log(train_step(model, optimizer, x, y))
        if step in (4, 12):
            net[2].weight.data = net[0].weight.data
        if step == 8:
            net[2].weight.data = net[0].weight.data.clone()


@adversarial(fallback="")
def test_memory_of_a_parameter_is_replaced_by_a_view_of_a_flat_tensor_in_mid_run(run: Script) -> None:
    """Weights are flattened after some steps; from then on the script reads and writes the flat tensor."""
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    flat = None
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if step == 6:
            flat, offset = torch.cat([p.detach().flatten() for p in net.parameters()]), 0
            for p in net.parameters():
                p.data = flat[offset : offset + p.numel()].view_as(p)
                offset += p.numel()
        if flat is not None:
            run.log(flat.norm())
            flat.mul_(0.99)


@adversarial(fallback="")
def test_alias_is_taken_in_mid_run_and_read_for_the_rest(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    kept: list[torch.Tensor] = []
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if step == 6:
            kept = [net[0].weight.data, net[2].weight.detach()[0], net[4].weight.view(-1).detach()]
        run.log([k.sum() for k in kept])


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
    for step, (x, y) in enumerate(run.batches()):
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


@adversarial()
def test_freeze_by_grad_none_and_requires_grad_of_single_tensors(run: Script) -> None:
    net = mlp()
    model = run.ddp(net, find_unused_parameters=True)
    optimizer = AdamW(model.parameters(), lr=0.03)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches()):
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
    for x, y in run.batches(10):
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
