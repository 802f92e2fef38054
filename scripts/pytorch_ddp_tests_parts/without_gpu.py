"""Lets tests that were written for one GPU a rank run on CPUs: what they do with `cuda` is done where the tensor is.

Patches torch in this process, which must be one that ends after the test.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_distributed

_FACTORIES = ("arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")


def _is_gpu(device: Any) -> bool:
    return (isinstance(device, int) and not isinstance(device, bool)) or str(device).startswith("cuda")


def _here(*_: Any, **__: Any) -> None:
    """Every device is this one."""


def _same(thing: Any, *_: Any, **__: Any) -> Any:
    return thing


def _without_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_gpu(kwargs.get("device")):
            del kwargs["device"]
        return function(*args, **kwargs)

    return call


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_gpu(kwargs.get("device")):
            del kwargs["device"]
        if args and _is_gpu(args[0]):
            args = args[1:]
        return original(self, *args, **kwargs) if args or kwargs else self

    return to


def _ddp_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        original(self, module, **kwargs)

    return init


def pretend(ranks: int) -> None:
    """Pretend that there are as many GPUs as ranks. Call it before the tests are imported."""
    for kind in (torch.Tensor, nn.Module):
        kind.cuda = _same  # type: ignore[assignment, method-assign]
        kind.to = _to(kind.to)  # type: ignore[method-assign]
    for name in _FACTORIES:
        setattr(torch, name, _without_device(getattr(torch, name)))
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, _here)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: ranks
    torch.cuda.stream = torch.cuda.device = contextlib.nullcontext  # type: ignore[assignment, misc]
    DistributedDataParallel.__init__ = _ddp_init(DistributedDataParallel.__init__)  # type: ignore[method-assign]
    # Decorators, and what tests ask for the GPU of each rank.
    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: _same
    common_distributed.nccl_skip_if_lt_x_gpu = lambda *_, **__: _same
    common_distributed.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}
