"""What happens once in a program, by name: each is a few lines of some user's script.

An event gets the `training.Run`, does its thing through names that exist with and without `attach`, and returns what
the script would see. What it draws comes from `run.event_seed`, the same in all arms and on all ranks.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comparison import snapshot

if TYPE_CHECKING:
    from .training import Run

EVENTS: dict[str, Callable[[Run], Any]] = {}


def event(function: Callable[[Run], Any]) -> Callable[[Run], Any]:
    """Register an event under its name."""
    EVENTS[function.__name__] = function
    return function


def _draw(run: Run) -> random.Random:
    return random.Random(run.event_seed)


def _one(run: Run) -> nn.Parameter:
    return _draw(run).choice([p for p in run.main.parameters if p.numel()])


def _has_hooks(run: Run) -> bool:
    return bool(run.script.get("hooks") or run.script.get("hooks_write"))


def _with_gradients(run: Run) -> list[nn.Parameter]:
    return [p for p in run.main.parameters if p.grad is not None]


# Forwards.


def _evaluated(run: Run) -> Tensor:
    net = run.main.net.eval()
    output: Tensor = net(run.batch(50_000)[0])
    net.train()
    return output


@event
def evaluate(run: Run) -> Any:
    with torch.no_grad():
        return _evaluated(run)


@event
def evaluate_inference(run: Run) -> Any:
    with torch.inference_mode():
        output = _evaluated(run)
    return output.clone()


@event
@torch.no_grad()
def layer_called(run: Run) -> Any:
    """One layer alone, not the model."""
    layer = next(module for module in run.main.net.modules() if isinstance(module, nn.Linear))
    return layer(torch.ones(2, layer.in_features, dtype=layer.weight.dtype, device="cpu"))


@event
def evaluate_ddp(run: Run) -> Any:
    run.main.ddp.eval()
    with torch.no_grad():
        output = run.main.ddp(run.batch(50_001)[0])
    run.main.ddp.train()
    return output


@event
def forward_without_grad(run: Run) -> Any:
    with torch.no_grad():
        state = torch.get_rng_state()
        output = run.main.net(run.batch(50_002)[0])
        torch.set_rng_state(state)
        return output


@event
def forward_unused(run: Run) -> Any:
    """A forward through DDP whose loss nobody wants."""
    return run.main.ddp(run.batch(50_003)[0]).detach()


@event
def functional_call(run: Run) -> Any:
    halved = {name: p.detach() * 0.5 for name, p in run.main.net.named_parameters()}
    with torch.no_grad():
        return torch.func.functional_call(run.main.net, halved, (run.batch(50_004)[0],))


@event
def func_grad(run: Run) -> Any:
    net = run.main.net
    x, y = run.batch(50_005)
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(of: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(net, of, (x,)), y)

    return torch.func.grad(loss)(weights)


@event
def func_grad_of_input(run: Run) -> Any:
    """A transform is the first to see the parameters, from inside."""
    x, y = run.batch(50_008)
    return torch.func.grad(lambda z: nn.functional.mse_loss(run.main.net(z), y))(x)


@event
def autograd_grad(run: Run) -> Any:
    x, y = run.batch(50_006)
    loss = nn.functional.mse_loss(run.main.net(x), y)
    return torch.autograd.grad(loss, [p for p in run.main.parameters if p.requires_grad], allow_unused=True)


@event
def micro_batch_dropped(run: Run) -> None:
    """One whose gradients nobody wants after all."""
    x, y = run.batch(50_009)
    with run.main.ddp.no_sync(), run.counted(len(x)):
        nn.functional.mse_loss(run.main.ddp(x), y).backward()
    run.main.ddp.zero_grad(set_to_none=_draw(run).random() < 0.5)


@event
def train_and_eval(run: Run) -> None:
    run.main.net.eval()
    run.main.net.train()


# Checkpoints and copies.


@event
def state_dict(run: Run) -> Any:
    return run.main.net.state_dict()


@event
def state_dict_of_layer(run: Run) -> Any:
    return next(run.main.net.children()).state_dict()


@event
def load_state_dict(run: Run) -> None:
    saved = snapshot(run.main.ddp.state_dict())
    first = next(iter(saved))
    saved[first] = saved[first] * 0.9
    run.main.ddp.load_state_dict(saved)


@event
def optimizer_state_dict(run: Run) -> Any:
    run.consolidate()
    return [optimizer.state_dict() for optimizer in run.main.optimizers]


@event
def optimizer_resumes(run: Run) -> None:
    """Save and load, as a resumed run does."""
    run.consolidate()
    for optimizer in run.main.optimizers:
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        optimizer.load_state_dict(torch.load(saved))


@dataclass(frozen=True)
class _Order:
    """In which order entries come; None where no order is promised, which equals any."""

    places: list[int] | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Order) and (None in (self.places, other.places) or self.places == other.places)


@event
def optimizer_state_read(run: Run) -> Any:
    run.consolidate()
    is_sharded = run.arm is not None and bool(run.arm.get("shard_optimizer"))
    seen = []
    for optimizer in run.main.optimizers:
        places = {
            id(p): place for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }
        entries = {places[id(parameter)]: state for parameter, state in dict(optimizer.state).items()}
        seen.append({"order": _Order(None if is_sharded else list(entries)), "entries": entries})
    return seen


@event
def optimizer_state_edited(run: Run) -> None:
    run.consolidate()
    for optimizer in run.main.optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim():
                    value.mul_(0.5)


@event
def optimizer_copied(run: Run) -> Any:
    run.consolidate()
    return [copy.deepcopy(optimizer).state_dict() for optimizer in run.main.optimizers]


@event
def optimizer_pickled(run: Run) -> Any:
    run.consolidate()
    if run.script.get("after_update") or run.script.get("scheduler"):
        return None  # hooks and schedulers of this script are functions of their own, which do not pickle
    return [pickle.loads(pickle.dumps(optimizer)).state_dict() for optimizer in run.main.optimizers]


@event
def module_copied(run: Run) -> Any:
    return copy.deepcopy(run.main.net).state_dict() if not _has_hooks(run) else None


@event
def module_pickled(run: Run) -> Any:
    if _has_hooks(run):
        return None
    saved = io.BytesIO()
    torch.save(run.main.net, saved)
    saved.seek(0)
    return torch.load(saved, weights_only=False).state_dict()


# Gradients.


@event
def gradients_read(run: Run) -> Any:
    return [p.grad for p in run.main.parameters]


@event
def gradient_norm(run: Run) -> Any:
    return [p.grad.norm() for p in _with_gradients(run) if p.numel()]


@event
def gradients_halved(run: Run) -> None:
    for p in _with_gradients(run)[::2]:
        p.grad *= 0.5  # type: ignore[operator]


@event
def gradients_replaced(run: Run) -> None:
    for p in _with_gradients(run)[1::2]:
        p.grad = p.grad * 2.0  # type: ignore[operator]


@event
def gradient_dropped(run: Run) -> None:
    _one(run).grad = None


@event
def gradients_kept(run: Run) -> Any:
    run.kept.extend(p.grad for p in _with_gradients(run)[:2])
    return [kept.sum() for kept in run.kept[:-2]] if not run.script.get("bucket_view") else None


@event
def gradients_taken(run: Run) -> None:
    """Exchange the gradients of two parameters that look alike."""
    by_shape: dict[Any, nn.Parameter] = {}
    for p in _with_gradients(run):
        if (other := by_shape.setdefault((p.shape, p.stride()), p)) is not p:
            p.grad, other.grad = other.grad, p.grad
            return


@event
def second_backward(run: Run) -> None:
    """A loss of its own, past DDP, which adds to gradients that DDP has reduced."""
    x, y = run.batch(50_007)
    run.scaler.scale(nn.functional.mse_loss(run.main.net(x), y) * 0.1).backward()


# Parameters.


@event
def parameters_read(run: Run) -> Any:
    return [p.detach().abs().sum() for p in run.main.parameters]


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return x * 1.0


def _as_data(p: Tensor) -> Tensor:
    x = torch.empty(0, dtype=p.dtype, device="cpu")
    x.data = p
    return x.clone()


def _without_torch_function(p: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return p * 1.0


PAST_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda p: torch.tensor(p, device="cpu"),
    "list": lambda p: torch.tensor([p, p], device="cpu") if not p.dim() else torch.tensor(p, device="cpu"),
    "new_tensor": lambda p: torch.ones(1, device="cpu").new_tensor(p),
    "as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float64, device="cpu"),
    "asarray": lambda p: torch.asarray(p, dtype=torch.float64, device="cpu"),
    "script": _scripted,
    "as_data": _as_data,
    "nested": lambda p: torch.nested.nested_tensor([p]).unbind()[0],
    "operator": lambda p: torch.ops.aten.mul.Tensor(p, 1.0),
    "disabled": _without_torch_function,
}
"""Reads a tensor in code that does not ask for its `__torch_function__`."""


def _read_past_torch(run: Run, values: list[Tensor], names: set[str]) -> Any:
    """What such code reads, or what the script then does as the error says."""
    draw = _draw(run)
    name, value = draw.choice(sorted(names)), draw.choice([v for v in values if v.numel()])
    with torch.no_grad():
        try:
            return PAST_TORCH[name](value).detach()
        except RuntimeError as error:
            if ".detach() instead of" not in str(error):
                raise
            return PAST_TORCH[name](value.detach()).detach()


@event
def parameters_read_past_torch(run: Run) -> Any:
    return _read_past_torch(run, list(run.main.parameters), set(PAST_TORCH))


@event
def gradients_read_past_torch(run: Run) -> Any:
    gradients = [p.grad for p in _with_gradients(run)]
    # The process would die where it uses what it has put into `.data`, as docs/exactness.md says.
    return _read_past_torch(run, gradients, PAST_TORCH.keys() - {"as_data"}) if gradients else None


@event
@torch.no_grad()
def parameters_clamped(run: Run) -> None:
    for p in run.main.parameters[::2]:
        p.clamp_(-0.3, 0.3)


@event
@torch.no_grad()
def parameters_copied_into(run: Run) -> None:
    p = _one(run)
    p.copy_(p * 0.9)


@event
def parameters_scaled_as_data(run: Run) -> None:
    for p in run.main.parameters[1::2]:
        p.data.mul_(0.9)


@event
def parameters_kept_as_data(run: Run) -> Any:
    run.kept.append(_one(run).detach())
    return [kept.sum() for kept in run.kept if isinstance(kept, Tensor) and not run.script.get("bucket_view")]


@event
def parameters_as_vector(run: Run) -> None:
    parameters = [p for p in run.main.parameters if p.is_contiguous()]
    vector = nn.utils.parameters_to_vector(parameters) * 0.95
    nn.utils.vector_to_parameters(vector.detach(), parameters)


@event
def memory_replaced(run: Run) -> None:
    p = _one(run)
    p.data = p.data.clone()


@event
def to_double_and_back(run: Run) -> None:
    """Parameters go elsewhere and come back, in other memory: all, or those of a layer, which DDP takes for unused."""
    if run.script.get("dtype", "float32") == "float32":
        net = run.main.net
        moved = _draw(run).choice([net, *net.children()] if run.script.get("find_unused") else [net])
        moved.double()
        moved.float()


@event
def frozen(run: Run) -> None:
    _one(run).requires_grad_(False)


@event
def thawed(run: Run) -> None:
    for p in run.trainable:
        p.requires_grad_(True)


# The optimizer.


@event
def learning_rate(run: Run) -> None:
    for optimizer in run.main.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


@event
def weight_decay(run: Run) -> None:
    for optimizer in run.main.optimizers:
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.05


@event
def group_added(run: Run) -> None:
    """A parameter of the script's own that the model does not have."""
    own = nn.Parameter(torch.ones(3, device="cpu"))
    own.grad = torch.full((3,), 0.1, device="cpu")
    run.kept.append(own)
    run.main.optimizers[0].add_param_group({"params": [own], "lr": 0.01})


@event
def step_raises(run: Run) -> None:
    from .training import Boom

    def fail(*_: Any) -> None:
        handle.remove()
        raise Boom

    handle = run.main.optimizers[0].register_step_pre_hook(fail)


@event
def step_skipped(run: Run) -> None:
    run.skips = True


@event
def step_twice(run: Run) -> None:
    for optimizer in run.main.optimizers:
        optimizer.step()


@event
def forward_raises(run: Run) -> None:
    run.raise_in_forward()


@event
def loss_raises(run: Run) -> None:
    run.raises = "loss"


# Other threads, other users of the process.


@event
def thread_reads(run: Run) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(snapshot(run.main.net.state_dict())))
    thread.start()
    thread.join()
    return found


@event
def thread_reads_gradients(run: Run) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(snapshot([p.grad for p in run.main.parameters])))
    thread.start()
    thread.join()
    return found


@event
def random_numbers(run: Run) -> Any:
    return torch.rand(3, device="cpu")


@event
def garbage(run: Run) -> None:
    gc.collect()


@event
def group_made(run: Run) -> Any:
    group = dist.new_group()
    value = torch.ones(1, device="cpu")
    dist.all_reduce(value, group=group)
    return value


@event
def all_reduced(run: Run) -> Any:
    value = torch.ones(1, device="cpu") * run.rank
    dist.all_reduce(value)
    return value


# The state.


@event
def attached_again(run: Run) -> None:
    # Between a forward and its backward DDP keeps the hook.
    if all(part.state is not None for part in run.parts) and not run.awaits_backward:
        run.detach()
        run.attach()


@event
def detached(run: Run) -> None:
    run.detach()


@event
def synchronized(run: Run) -> None:
    for part in run.parts:
        if part.state is not None:
            part.state.synchronize()


@event
def figures_read(run: Run) -> None:
    for part in run.parts:
        if part.state is not None:
            repr(part.state)
            repr(part.state.stats())


@event
def wire_state_saved(run: Run) -> None:
    for part in run.parts:
        if part.state is not None:
            part.state.load_state_dict(part.state.state_dict())
