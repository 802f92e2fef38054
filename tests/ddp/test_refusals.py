"""What cannot be made right is refused at once, by an error that names the culprit and the way out.

Left out: CUDA graph capture, which needs a GPU, and `delay_all_reduce_named_params` with all
parameters, which DDP's own constructor has refused since PyTorch 2.11 at the latest.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from models import INPUTS, OUTPUTS, OddNet

REFUSALS = (TypeError, ValueError, RuntimeError)


def _attach(model: object, optimizer: object = None, **options: object) -> object:
    import ddp_crossover as dx

    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dx.attach(model, optimizer, **options)


def _ddp(module: nn.Module | None = None, **options: object) -> DistributedDataParallel:
    return DistributedDataParallel(module or OddNet(), **options)


def _not_ddp() -> None:
    _attach(OddNet())


def _sparse_embedding() -> None:
    net = nn.Sequential()
    net.add_module("words", nn.Embedding(5, 3, sparse=True))
    _attach(_ddp(net))


def _mixed_precision() -> None:
    model = _ddp()
    # What DDP(mixed_precision=...) stores. Its constructor also makes CUDA streams.
    model.mixed_precision = MixedPrecision(param_dtype=torch.bfloat16)
    _attach(model)


def _python_reducer() -> None:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        _attach(_ddp())
    finally:
        torch._dynamo.config.optimize_ddp = True


def _compiled_autograd() -> None:
    torch._dynamo.config.compiled_autograd = True
    try:
        _attach(_ddp())
    finally:
        torch._dynamo.config.compiled_autograd = False


def _another_hook_before() -> None:
    model = _ddp()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    _attach(model)


def _attached_twice() -> None:
    model = _ddp()
    _attach(model)
    _attach(model)


def _optimizer_in_backward() -> None:
    net = OddNet()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    _attach(_ddp(net))


def _hook_of_cpp_before() -> None:
    model = _ddp()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    _attach(model)


def _backward(model: nn.Module) -> None:
    model(torch.ones(3, INPUTS)).sum().backward()


def _hook_without_state() -> None:
    import ddp_crossover as dx

    model = _ddp()
    model.register_comm_hook(None, dx.dear_hook)
    _backward(model)


def _state_of_another_model() -> None:
    import ddp_crossover as dx

    model, other = _ddp(), _ddp()
    other.register_comm_hook(dx.DearState(model, torch.optim.SGD(model.parameters(), lr=0.1)), dx.dear_hook)
    _backward(other)


def _state_that_was_detached() -> None:
    import ddp_crossover as dx

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


def _no_optimizer() -> None:
    _attach(_ddp(), [])


def _scheduler_for_optimizer() -> None:
    model = _ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _attach(model, torch.optim.lr_scheduler.ConstantLR(optimizer))


def _optimizer_of_another_model() -> None:
    _attach(_ddp(), torch.optim.SGD(OddNet().parameters(), lr=0.1))


def _unknown_schedule() -> None:
    _attach(_ddp(), schedule="fastest")


def _negative_fusion_mb() -> None:
    _attach(_ddp(), fusion_mb=-1.0)


def _integers_on_the_wire() -> None:
    _attach(_ddp(), wire_dtype=torch.int16)


def _fp32_on_the_wire() -> None:
    _attach(_ddp(), wire_dtype=torch.float32)


def _name_of_a_backend_for_a_group() -> None:
    _attach(_ddp(), process_group="gloo")


def _unknown_option() -> None:
    _attach(_ddp(), fusion_size=1.0)


def _deepcopy() -> None:
    model = _ddp()
    _attach(model)
    copy.deepcopy(model)


def _pickle() -> None:
    model = _ddp()
    _attach(model)
    pickle.dumps(model)


def _refusal(provoke: Callable[[], None]) -> str | None:
    """What was raised, or None."""
    try:
        provoke()
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    ("provoke", "names", "way_out"),
    [
        (_not_ddp, "DistributedDataParallel.*OddNet", "wrap"),
        (_sparse_embedding, r"words\.weight.*sparse", "sparse=False"),
        (_mixed_precision, "mixed_precision", "autocast"),
        (_python_reducer, "python_reducer", "ddp_optimizer|True"),
        (_compiled_autograd, "compiled.autograd", "False"),
        (_another_hook_before, "hook", "new DistributedDataParallel|register_comm_hook"),
        (_hook_of_cpp_before, "hook", "new DistributedDataParallel|register_comm_hook"),
        (
            _hook_without_state,
            "TypeError.*dear_hook.*DearState, not NoneType",
            r"attach\(ddp, optimizer\).*DearCallback",
        ),
        (_state_of_another_model, "another model", "its own"),
        (_state_that_was_detached, "detached", r"attach\(ddp, optimizer\)"),
        (_attached_twice, "hook", "new DistributedDataParallel|detach"),
        (_optimizer_in_backward, "(scalar|first|second).*backward", r"step\(\)"),
        (_inside_of_join, "join", "drop_last|without the hook"),
        (_lbfgs, "LBFGS", "first-order|without"),
        (_no_optimizer, "optimizer", "none|list"),
        (_scheduler_for_optimizer, "ConstantLR", "pass"),
        (_optimizer_of_another_model, "SGD", r"ddp\.parameters"),
        (_unknown_schedule, "schedule.*fastest", "auto.*dear.*allreduce"),
        (_negative_fusion_mb, "fusion_mb", "greater than 0|positive"),
        (_integers_on_the_wire, r"wire_dtype.*torch\.int16", r"bfloat16.*float16.*leave it out"),
        (_fp32_on_the_wire, r"wire_dtype.*torch\.float32", r"bfloat16.*float16.*leave it out"),
        (_name_of_a_backend_for_a_group, "process_group.*'gloo'", r"new_group\(\)"),
        (_unknown_option, "fusion_size", ""),
        (_deepcopy, "copy", r"detach|\.module"),
        (_pickle, "pickle", r"detach|state_dict"),
    ],
)
def test_refusal_names_the_culprit_and_the_way_out(on_ranks, provoke, names, way_out) -> None:
    (message,) = on_ranks(_refusal, 1, provoke)
    assert message is not None, "not refused"
    assert re.search(names, message, re.DOTALL | re.IGNORECASE), message
    assert re.search(way_out, message, re.DOTALL | re.IGNORECASE), message


def _join_with_uneven_inputs() -> None:
    model = _ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _attach(model, optimizer)
    with Join([model]):
        for _ in range(3 + dist.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(3, INPUTS)).sum().backward()
            optimizer.step()


def test_join_is_an_error_and_not_a_hang(on_ranks) -> None:
    for message in on_ranks(_refusal, 2, _join_with_uneven_inputs):
        assert message is not None, "not refused"
        assert re.search("join", message), message


def _register_a_second_hook() -> None:
    model = _ddp()
    _attach(model)
    model.register_comm_hook(None, default_hooks.allreduce_hook)


def test_a_second_hook_after_ours_is_refused(on_ranks) -> None:
    (message,) = on_ranks(_refusal, 1, _register_a_second_hook)
    assert message is not None and "hook" in message


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
