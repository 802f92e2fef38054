"""How torch finds a function's implementation: modes, transforms, lists of classes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from ddp_crossover.torch_internals.private import private
from ddp_crossover.walks import walk

T = TypeVar("T")
_CPU = torch.device("cpu")


def tensors_in_output(output: Any) -> list[torch.Tensor]:
    """Return all tensors in a module's output, inside tuples, lists and dicts of any depth."""
    return [each for each in walk(output, parts_of_output) if isinstance(each, torch.Tensor)]


def parts_of_output(output: Any) -> list[Any]:
    """What is directly in a tuple, list or dict, or in another container that torch knows."""
    if output is None or isinstance(output, (torch.Tensor, bool, int, float, str)):
        return []  # at once: an output may hold very many
    are_parts = itertools.chain((False,), itertools.repeat(True))  # after the first call, which is for the container
    leaves = private(private(torch.utils, "_pytree"), "tree_leaves")
    found: list[Any] = leaves(output, is_leaf=lambda _: next(are_parts))
    return [] if len(found) == 1 and found[0] is output else found


def allow_foreach(tensor_class: type[torch.Tensor]) -> None:
    """Let torch's foreach implementations accept tensors of this class, as DTensor does for itself.

    For classes that are not on torch's lists, the stock ``clip_grad_norm_`` and optimizers on CUDA process one tensor
    at a time, and round differently.
    """
    for module in (private(torch.utils, "_foreach_utils"), sys.modules[Optimizer.__module__]):
        supported = private(module, "_foreach_supported_types")
        if tensor_class not in supported:
            supported.append(tensor_class)


def is_inside_of_modes() -> bool:
    """Whether functions or operators go through a mode of the caller's; ``with torch.device(...)`` is none here."""
    modes = private(torch.overrides, "_get_current_function_mode_stack")()
    is_usual = all(type(mode).__module__ == "torch.utils._device" for mode in modes)
    return not is_usual or private(torch._C, "_len_torch_dispatch_stack")() > 0


def default_device() -> torch.device:
    """The default device of this thread, as it was set; ``torch.get_default_device()`` makes a tensor for its index."""
    if private(torch._C, "_len_torch_function_stack")() == 0:
        return _CPU
    modes = private(torch.overrides, "_get_current_function_mode_stack")()
    return next((mode.device for mode in reversed(modes) if type(mode).__module__ == "torch.utils._device"), _CPU)


def outside_of_modes(job: Callable[[], T]) -> T:
    """Return ``job()``, out of sight of the caller's modes, transforms, hooks on saved tensors and ``torch.jit.trace``.

    All of these belong to this thread, and are taken off it meanwhile. Another thread would have none of them, but it
    could not take the locks that the caller holds, and ``job`` may call functions of users, which need them. The
    default device stays, because factories that an optimizer calls follow it.
    """
    default = getattr(private(torch, "_GLOBAL_DEVICE_CONTEXT"), "device_context", None)
    depth = private(torch._C, "_len_torch_function_stack")()
    if default is None:
        is_usual = depth == 0
    else:
        is_usual = depth == 1 and private(torch._C, "_get_function_stack_at")(0) is default
    is_dispatched = private(torch._C, "_len_torch_dispatch_stack")() > 0
    is_in_transform = private(torch._C._functorch, "peek_interpreter_stack")() is not None
    hooks_on_saved = private(torch._C._autograd, "_top_saved_tensors_default_hooks")
    has_hooks = hooks_on_saved(False) is not None  # as in a checkpoint, which counts what autograd saves
    if is_usual and not (is_dispatched or is_in_transform or is_traced() or has_hooks):
        return job()
    with contextlib.ExitStack() as taken_off:
        if not is_usual:
            taken_off.enter_context(_only_function_mode(default))
        if is_dispatched:
            dispatch = importlib.import_module("torch.utils._python_dispatch")
            taken_off.enter_context(private(dispatch, "_disable_current_modes")())
        if is_in_transform:
            functorch = importlib.import_module("torch._functorch.pyfunctorch")
            taken_off.enter_context(private(functorch, "temporarily_clear_interpreter_stack")())
        if is_traced():
            set_trace = private(torch._C, "_set_tracing_state")
            taken_off.callback(set_trace, private(torch._C, "_get_tracing_state")())
            set_trace(None)
        if has_hooks:
            taken_off.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is))
        return job()


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def _only_function_mode(mode: Any) -> Iterator[None]:
    """Context in which ``mode`` is this thread's only function mode; None for no mode at all."""
    push, pop = private(torch.overrides, "_push_mode"), private(torch.overrides, "_pop_mode")
    before = [pop() for _ in range(private(torch._C, "_len_torch_function_stack")())]
    if mode is not None:
        push(mode)
    try:
        yield
    finally:
        if mode is not None:
            pop()
        for each in reversed(before):
            push(each)


def is_traced() -> bool:
    """Whether ``torch.jit.trace`` is recording this thread."""
    return bool(private(torch.jit, "is_tracing")())


def settle_before_use(settle: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Pass tensor arguments through ``settle`` in torch functions that do not look up ``__torch_function__``.

    These are ``torch.func`` and ``vmap``, ``torch.utils.swap_tensors``, ``to_dlpack``, ``nn.Parameter(tensor)``. They
    stay wrapped for the rest of the process.

    Args:
        settle: returns the tensor to use in place of the one that it is given.
    """
    transforms = importlib.import_module("torch._functorch.eager_transforms")
    for owner, name in (
        (transforms, "_wrap_for_grad"),
        (transforms, "_maybe_wrap_functional_tensor"),
        (importlib.import_module("torch._functorch.vmap"), "_add_batch_dim"),
        (torch.utils, "swap_tensors"),
        (importlib.import_module("torch.utils.dlpack"), "to_dlpack"),
        (torch, "to_dlpack"),
        (torch.nn.Parameter, "__new__"),
    ):
        take_in = private(owner, name)
        if not isinstance(take_in, _SettleFirst):
            setattr(owner, name, functools.update_wrapper(_SettleFirst(take_in, settle), take_in))


@functools.cache
def describe_gradients_by(memory_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Where torch makes fake tensors of parameters, have it describe ``memory_of(parameter.grad)`` in their gradients.

    Dynamo, ``torch.export`` and ``FakeTensorMode`` do so. They need no value, and cannot describe a wrapper. It stays
    so for the rest of the process.
    """
    descriptions: Any = importlib.import_module("torch._subclasses.meta_utils")
    gradient_of = private(descriptions, "safe_grad")

    @functools.wraps(gradient_of)
    def memory_of_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
        gradient = gradient_of(tensor)
        return None if gradient is None else memory_of(gradient)

    descriptions.safe_grad = memory_of_gradient


class _SettleFirst:
    def __init__(self, take_in: Callable[..., Any], settle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._take_in = take_in
        self._settle = settle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._take_in(*map(self._settled, args), **{name: self._settled(arg) for name, arg in kwargs.items()})

    def _settled(self, value: Any) -> Any:
        return self._settle(value) if isinstance(value, torch.Tensor) else value
