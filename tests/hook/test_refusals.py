"""What cannot be made right is refused at once, by an error that names the culprit and the way out.

Left out: CUDA graph capture, which needs a GPU, and `delay_all_reduce_named_params` with all
parameters, which DDP's own constructor has refused since PyTorch 2.11 at the latest.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from models import INPUTS, OUTPUTS, OddNet


def _ddp(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or OddNet(), **options)


def _attach(model: Any = None, optimizer: Any = None, **options: Any) -> dx.DearState:
    model = model or _ddp()
    return dx.attach(model, torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer, **options)


def _backward(model: nn.Module) -> None:
    model(torch.ones(3, INPUTS)).sum().backward()


def _mixed_precision() -> None:
    model = _ddp()
    # What DDP(mixed_precision=...) stores. Its constructor also makes CUDA streams.
    model.mixed_precision = MixedPrecision(param_dtype=torch.bfloat16)
    _attach(model)


def _with_dynamo(setting: str, value: object) -> None:
    with torch._dynamo.config.patch(setting, value):
        _attach()


def _another_hook_before() -> None:
    model = _ddp()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    _attach(model)


def _hook_of_cpp_before() -> None:
    model = _ddp()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    _attach(model)


def _attached_twice() -> None:
    model = _ddp()
    _attach(model)
    _attach(model)


def _another_hook_after() -> None:
    model = _ddp()
    _attach(model)
    model.register_comm_hook(None, default_hooks.allreduce_hook)


def _optimizer_in_backward() -> None:
    net = OddNet()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    _attach(_ddp(net))


def _hook_without_state() -> None:
    model = _ddp()
    model.register_comm_hook(None, dx.dear_hook)
    _backward(model)


def _state_of_another_model() -> None:
    model, other = _ddp(), _ddp()
    other.register_comm_hook(dx.DearState(model, torch.optim.SGD(model.parameters(), lr=0.1)), dx.dear_hook)
    _backward(other)


def _state_that_was_detached() -> None:
    model = _ddp()
    state = _attach(model)
    state.detach()
    model.register_comm_hook(state, dx.dear_hook)
    _backward(model)


def _inside_of_join() -> None:
    model = _ddp()
    with model.join():
        _attach(model)


def _lbfgs() -> None:
    model = _ddp()
    _attach(model, torch.optim.LBFGS(model.parameters()))


def _keeps_views_of_buckets() -> None:
    model = _ddp(gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _backward(model)
    for p in model.parameters():
        optimizer.state[p]["before"] = p.grad
    _attach(model, optimizer)


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))


def _copied(how: Callable[[Any], Any]) -> None:
    model = _ddp()
    _attach(model, weighted=True)
    how(model)


NEW_MODEL = "new DistributedDataParallel|register_comm_hook"
# What provokes the error, what it names, and its way out.
REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "sparse embedding": (
        lambda: _attach(_ddp(nn.Sequential(nn.Embedding(5, 3, sparse=True)))),
        r"0\.weight.*sparse",
        "sparse=False",
    ),
    "TorchScript": (lambda: _attach(_ddp(nn.Sequential(torch.jit.script(nn.Linear(3, 3))))), "TorchScript", ""),
    "complex": (lambda: _attach(_ddp(_Complex())), "weight is complex", ""),
    "mixed precision": (_mixed_precision, "mixed_precision", "autocast"),
    "python reducer": (lambda: _with_dynamo("optimize_ddp", "python_reducer"), "python_reducer", "ddp_optimizer|True"),
    "compiled autograd": (lambda: _with_dynamo("compiled_autograd", True), "compiled.autograd", "False"),
    "another hook before": (_another_hook_before, "hook", NEW_MODEL),
    "hook of C++ before": (_hook_of_cpp_before, "hook", NEW_MODEL),
    "another hook after": (_another_hook_after, "hook", ""),
    "attached twice": (_attached_twice, "hook", "new DistributedDataParallel|detach"),
    "hook without state": (
        _hook_without_state,
        "TypeError.*dear_hook.*DearState, not NoneType",
        r"attach\(ddp, optimizer\).*DearCallback",
    ),
    "state of another model": (_state_of_another_model, "another model", "its own"),
    "state that was detached": (_state_that_was_detached, "detached", r"attach\(ddp, optimizer\)"),
    "optimizer in backward": (_optimizer_in_backward, "(scalar|first|second).*backward", r"step\(\)"),
    "inside of join": (_inside_of_join, "join", "drop_last|without the hook"),
    "LBFGS": (_lbfgs, "LBFGS", "first-order|without"),
    "state that keeps views of buckets": (_keeps_views_of_buckets, "state of SGD keeps gradients", r"grad\.clone\(\)"),
    "no optimizer": (lambda: _attach(optimizer=[]), "optimizer", "none|list"),
    "optimizer of another model": (
        lambda: _attach(optimizer=torch.optim.SGD(OddNet().parameters(), lr=0.1)),
        "SGD",
        r"ddp\.parameters",
    ),
    "unknown schedule": (lambda: _attach(schedule="fastest"), "schedule.*fastest", "auto.*dear.*allreduce"),
    "unknown norms": (lambda: _attach(norms="fast"), "norms", "must be one of exact, sharded"),
    "negative fusion_mb": (lambda: _attach(fusion_mb=-1.0), "fusion_mb", "greater than 0|positive"),
    "integers on the wire": (
        lambda: _attach(wire_dtype=torch.int16),
        r"wire_dtype.*torch\.int16",
        r"bfloat16.*float16.*leave it out",
    ),
    "fp32 on the wire": (
        lambda: _attach(wire_dtype=torch.float32),
        r"wire_dtype.*torch\.float32",
        r"bfloat16.*float16.*leave it out",
    ),
    "name for a group": (lambda: _attach(process_group="gloo"), "process_group.*'gloo'", r"new_group\(\)"),
    "unknown option": (lambda: _attach(fusion_size=1.0), "fusion_size", ""),
    "deepcopy": (lambda: _copied(copy.deepcopy), "copy", r"detach|\.module"),
    "pickle": (lambda: _copied(pickle.dumps), "pickle", r"detach|state_dict"),
}


def _refusal(provoke: Callable[[], Any] | str) -> str | None:
    """What was raised, or None."""
    try:
        (REFUSED[provoke][0] if isinstance(provoke, str) else provoke)()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_the_culprit_and_the_way_out(on_ranks, name) -> None:
    _, culprit, way_out = REFUSED[name]
    (message,) = on_ranks(_refusal, 1, name)
    assert message is not None, "not refused"
    assert re.search(culprit, message, re.DOTALL | re.IGNORECASE), message
    assert re.search(way_out, message, re.DOTALL | re.IGNORECASE), message


def _join_with_uneven_inputs() -> None:
    model = _ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _attach(model, optimizer)
    with Join([model]):
        for _ in range(3 + dist.get_rank()):
            optimizer.zero_grad()
            _backward(model)
            optimizer.step()


def test_join_is_an_error_and_not_a_hang(on_ranks) -> None:
    for message in on_ranks(_refusal, 2, _join_with_uneven_inputs):
        assert message is not None, "not refused"
        assert re.search("join", message), message


def _train_a_step_after_refusal() -> bool:
    model = _ddp()
    before = [p.detach().clone() for p in model.parameters()]
    assert _refusal(lambda: _attach(model, schedule="fastest")) is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = _attach(model, optimizer)
    nn.functional.mse_loss(model(torch.ones(3, INPUTS)), torch.zeros(3, OUTPUTS)).backward()
    optimizer.step()
    state.synchronize()
    return any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_refused_attach_leaves_the_model_fit_for_the_next(on_ranks) -> None:
    assert on_ranks(_train_a_step_after_refusal, 2) == [True, True]
