"""Refuses models that are distributed in another way than by DDP alone, and devices that have no legs."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.torch_internals.ddp import is_slice_of_dtensor, is_wrapped_by_replicate

_DDP_ONLY = (
    "wrap the plain model in DistributedDataParallel, if a whole replica fits on each device, or train this model "
    "without ddp_crossover"
)


def refuse_other_parallelism(model: object) -> None:
    """Raise TypeError or ValueError if ``model`` was given to FSDP, ``replicate()`` or tensor parallelism."""
    kind = type(model).__name__
    if is_wrapped_by_replicate(model):
        raise TypeError(
            f"{kind} was made by torch.distributed._composable.replicate(), which keeps its DistributedDataParallel "
            f"to itself, so no hook can follow the model's forwards: {_DDP_ONLY}"
        )
    if _is_sharded_by_fsdp(model):
        raise TypeError(
            f"{kind} is sharded by FSDP (fully_shard() or FullyShardedDataParallel; HSDP is its hybrid form), which "
            f"reduces gradients by itself and calls no DDP hook: {_DDP_ONLY}"
        )
    if not isinstance(model, DistributedDataParallel):
        return
    if isinstance(model.module, nn.ParameterList):
        raise TypeError(
            "this DistributedDataParallel was made by replicate(): its module is a list of parameters, and its "
            f"forward never runs, so updates could not be applied in time: {_DDP_ONLY}"
        )
    for name, module in model.module.named_modules():
        if _is_sharded_by_fsdp(module):
            raise ValueError(
                f"{name or 'the model'} inside of this DistributedDataParallel is sharded by FSDP, which reduces its "
                f"gradients by itself: {_DDP_ONLY}"
            )
    for name, parameter in model.module.named_parameters():
        if _is_dtensor(parameter) or is_slice_of_dtensor(parameter):
            raise ValueError(
                f"{name} is a DTensor or a slice of one: the model is parallel in another way than by data, as by "
                "tensor parallelism (parallelize_module), and DDP replaces its parameters in every forward: "
                f"{_DDP_ONLY}"
            )
        refuse_device(parameter.device, name)


def refuse_device(device: torch.device, name: str) -> None:
    """Raise ValueError unless ``device``, on which the parameter ``name`` lies, is a CPU, or a GPU of CUDA or ROCm."""
    if device.type not in ("cpu", "cuda"):  # a ROCm build calls its GPUs cuda, too
        raise ValueError(
            f"{name} is on {device}, and ddp_crossover has legs for cpu and cuda (CUDA or ROCm) only: train this "
            "model with plain DistributedDataParallel (DDP_CROSSOVER=off or no attach), or move it to one of these"
        )


def _is_sharded_by_fsdp(module: object) -> bool:
    return _is_a(module, "torch.distributed.fsdp", "FSDPModule") or _is_a(
        module, "torch.distributed.fsdp", "FullyShardedDataParallel"
    )


def _is_dtensor(parameter: nn.Parameter) -> bool:
    return _is_a(parameter, "torch.distributed.tensor", "DTensor")


def _is_a(thing: object, module: str, name: str) -> bool:
    # These modules take long to import, and a script that has such an object has imported them.
    return module in sys.modules and isinstance(thing, getattr(sys.modules[module], name))
