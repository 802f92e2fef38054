"""How torch finds a function's implementation: modes, transforms, lists of classes."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ddp_crossover import device as gpu
from ddp_crossover.torch_internals.private import private


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return all tensors in a module's output, inside tuples, lists and dicts of any depth."""
    leaves = private(private(torch.utils, "_pytree"), "tree_leaves")(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def allow_foreach(tensor_class: type[torch.Tensor]) -> None:
    """Let torch's foreach implementations accept tensors of this class, as DTensor does for itself.

    For classes that are not on torch's lists, the stock ``clip_grad_norm_`` and optimizers on CUDA process one tensor
    at a time, and round differently.
    """
    for module in (private(torch.utils, "_foreach_utils"), sys.modules[Optimizer.__module__]):
        supported = private(module, "_foreach_supported_types")
        if tensor_class not in supported:
            supported.append(tensor_class)


def outside_of_modes(job: Callable[[], None], stream: gpu.Stream | None) -> None:
    """Run ``job`` out of sight of the caller's modes, functorch transforms and ``torch.jit.trace``.

    All of these belong to a thread, so if any is active, ``job`` runs on a new thread, which takes 0.1 ms. Exceptions
    of ``job`` are raised here.

    Args:
        job: the function to run.
        stream: the CUDA stream to run it on if a new thread is needed, or None.
    """
    depth_of_modes = private(torch._C, "_len_torch_dispatch_stack")() + private(torch._C, "_len_torch_function_stack")()
    is_in_transform = private(torch._C._functorch, "peek_interpreter_stack")() is not None
    if not (depth_of_modes or is_in_transform or is_traced()):
        job()
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with gpu.on_stream(stream):  # does nothing for None
                job()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ddp_crossover-outside-of-modes", daemon=True)
    thread.start()
    try:
        thread.join()
    finally:
        thread.join()  # after Ctrl-C, too: the job must not be left half done
    if errors:
        raise errors[0]


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


class _SettleFirst:
    def __init__(self, take_in: Callable[..., Any], settle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._take_in = take_in
        self._settle = settle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._take_in(*map(self._settled, args), **{name: self._settled(arg) for name, arg in kwargs.items()})

    def _settled(self, value: Any) -> Any:
        return self._settle(value) if isinstance(value, torch.Tensor) else value
