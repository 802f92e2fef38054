"""Refuses at attach what dear_hook cannot train exactly; each message names the setting and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from ddp_crossover.ddp.other_parallelism import refuse_other_parallelism
from ddp_crossover.ddp.refused_methods import JOIN_ADVICE
from ddp_crossover.fusion import Schedule
from ddp_crossover.top_k import TopK
from ddp_crossover.torch_internals.ddp import has_comm_hook, is_joining, is_updated_in_backward, managed_parameters


def refuse_model(ddp: DistributedDataParallel) -> None:
    """Raise TypeError or ValueError unless the gradients of ``ddp`` can go through the pipeline."""
    refuse_other_parallelism(ddp)
    if has_comm_hook(ddp):
        raise ValueError(
            "this DDP model has a communication hook already, and DDP takes only one: leave out the other "
            "register_comm_hook, call detach() if it is dear_hook, or build a new DistributedDataParallel around "
            "ddp.module"
        )
    if is_joining(ddp):
        raise ValueError(JOIN_ADVICE)
    if ddp.mixed_precision is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) casts and reduces gradients on its own: use "
            "torch.autocast instead, or keep mixed_precision without dear_hook"
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            "torch._dynamo.config.optimize_ddp='python_reducer' replaces DDP's reducer, which calls the "
            "hook: set it to True or 'ddp_optimizer'"
        )
    if torch._dynamo.config.compiled_autograd:
        raise ValueError(
            "compiled autograd (torch._dynamo.config.compiled_autograd=True) replaces the backward in which the "
            "hook runs: set it to False"
        )
    if getattr(ddp, "_delay_all_reduce_all_params", False):
        raise ValueError(
            "delay_all_reduce_named_params lists all parameters, so no gradient reaches the hook: delay only "
            "some of them, or leave the argument out"
        )
    _refuse_parameters(ddp)


def _refuse_parameters(ddp: DistributedDataParallel) -> None:
    for name, module in ddp.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"{name}.weight has sparse gradients, which cannot be copied into a flat fusion buffer: build {name} "
                "with sparse=False"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name or 'the model'} is a TorchScript module, whose forward runs no hooks: use the module that it "
                "was scripted from, with torch.compile for speed"
            )
    for name, parameter in managed_parameters(ddp):
        if parameter.is_complex():
            raise ValueError(
                f"{name} is complex, and gradients travel as real numbers: make it a real parameter and use "
                "torch.view_as_complex in forward"
            )
        if is_updated_in_backward(parameter):
            raise ValueError(
                f"{name} is updated inside backward (_apply_optimizer_in_backward): leave that out and call "
                "optimizer.step() after backward; dear_hook overlaps the update by itself"
            )


def refuse_optimizers(ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError unless ``deferred_updates`` can drive every optimizer."""
    if not optimizers:
        raise ValueError("optimizer is an empty list: pass the optimizer of the model, or a list of all its optimizers")
    managed = {id(parameter) for _, parameter in managed_parameters(ddp)}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS evaluates the model several times within one step and couples all parameters: use a "
                "first-order optimizer, or train without the hook"
            )
        if not any(id(p) in managed for g in optimizer.param_groups for p in g["params"]):
            raise ValueError(
                f"none of the parameters of {kind} belong to this DDP model: build the optimizer from ddp.parameters()"
            )


def refuse_momentum(world_size: int, compress: TopK | None, optimizers: Sequence[Optimizer]) -> None:
    """Raise if momentum correction would apply no momentum, or a second one.

    Raises:
        ValueError: if so.
    """
    if compress is None or not compress.momentum_correction:
        return
    if world_size == 1:
        raise ValueError(
            "momentum_correction applies the momentum to what is sent, and one rank sends nothing: give the optimizer "
            "the momentum, and leave out compress="
        )
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if group.get("momentum") or (group.get("betas") or (0.0,))[0]:
            raise ValueError(
                "momentum_correction applies the momentum before gradients are selected, and the optimizer applies one "
                "too: set the optimizer's momentum (or first beta) to 0, or leave out momentum_correction"
            )


def why_plain_all_reduce(ddp: DistributedDataParallel, schedule: Schedule) -> str | None:
    """Return why this model must be trained with plain all-reduces, or None if it can take the pipeline."""
    if schedule is Schedule.ALLREDUCE:
        return "schedule='allreduce': gradients are reduced by plain all-reduces, as asked for"
    if ddp.is_multi_device_module:
        return (
            "the module's parameters are on several devices, so gradients are reduced by plain all-reduces and "
            "nothing is deferred. Keep each replica on one device to overlap communication with forward"
        )
    return None
