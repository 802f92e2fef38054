"""Refuses at attach what cannot be trained exactly, and methods of DDP that would silently differ from then on.

Each message names the setting and what to do instead.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from ddp_crossover.fusion import Schedule
from ddp_crossover.hooks import PICKLE_ADVICE, Hook
from ddp_crossover.log import first_of
from ddp_crossover.torch_internals.ddp import (
    has_comm_hook,
    is_joining,
    is_slice_of_dtensor,
    is_updated_in_backward,
    is_wrapped_by_replicate,
    managed_parameters,
    no_comm_hooks,
    sparse_modules,
)
from ddp_crossover.torch_internals.memory import share_storage
from ddp_crossover.torch_internals.optimizers import require_hooks
from ddp_crossover.watching.optimizer_snapshot import optimizer_parameters
from ddp_crossover.watching.values import tensors_in

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
        if _is_a(parameter, "torch.distributed.tensor", "DTensor") or is_slice_of_dtensor(parameter):
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


def _is_a(thing: object, module: str, name: str) -> bool:
    # These modules take long to import, and a script that has such an object has imported them.
    return module in sys.modules and isinstance(thing, getattr(sys.modules[module], name))


_DEEPCOPY_ADVICE = (
    "copy.deepcopy(ddp) would silently drop the communication hook: copy ddp.module instead, or call "
    "state.detach() first"
)
JOIN_ADVICE = (
    "DistributedDataParallel.join() shadows only plain all-reduces and would hang with dear_hook: give every "
    "rank the same number of batches (DistributedSampler(drop_last=True)), attach with weighted=True and iterate over "
    "state.batches(loader), or train without the hook"
)
_ADVICE = {
    "__deepcopy__": _DEEPCOPY_ADVICE,
    "__reduce_ex__": PICKLE_ADVICE,
    "join": JOIN_ADVICE,
    "join_hook": JOIN_ADVICE,
}


class _Refuse(Hook):
    def __init__(self, advice: str) -> None:
        self._advice = advice

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(self._advice)


def refuse_methods(ddp: DistributedDataParallel) -> None:
    """Make these methods of the model raise RuntimeError."""
    for name, advice in _ADVICE.items():
        ddp.__dict__[name] = _Refuse(advice)  # bypasses nn.Module.__setattr__


def copy_as_plain(ddp: DistributedDataParallel, synchronize: Callable[[], None]) -> None:
    """Let copies and pickles of the model be plain DDP, as those for the best weights so far, or for averages.

    Args:
        ddp: the model.
        synchronize: applies all pending updates.
    """
    ddp.__dict__["__deepcopy__"] = _Plain(ddp, synchronize, copy.deepcopy)
    ddp.__dict__["__reduce_ex__"] = _Plain(ddp, synchronize, object.__reduce_ex__)


class _Plain(Hook):
    def __init__(
        self, ddp: DistributedDataParallel, synchronize: Callable[[], None], make: Callable[[Any, Any], Any]
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._synchronize = synchronize
        self._make = make

    def __call__(self, memo_or_protocol: Any) -> Any:
        ddp = self._ddp()
        assert ddp is not None  # it is being copied
        self._synchronize()
        ours = {name: ddp.__dict__.pop(name) for name in ("forward", *_ADVICE) if name in ddp.__dict__}
        with no_comm_hooks(ddp):
            try:
                return self._make(ddp, memo_or_protocol)
            finally:
                ddp.__dict__.update(ours)


def allow_methods(ddp: DistributedDataParallel) -> None:
    """Restore the model's own methods."""
    for name in _ADVICE:
        ddp.__dict__.pop(name, None)


def statistics_of_a_rank(model: nn.Module) -> str | None:
    """A warning about layers whose statistics are those of one rank's own batch; None if there are none."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm) and module.track_running_stats
    ]
    if not names:
        return None
    return (
        f"{first_of(names)} (BatchNorm) takes statistics of each rank's own batch, so its result depends on how "
        "samples are shared among ranks; that of GroupNorm and LayerNorm does not"
    )


def refuse_shared_statistics(model: nn.Module) -> None:
    """Raise ValueError for layers whose backward adds up losses of all ranks, before these are weighted."""
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm):
            raise ValueError(
                f"weighted=True weights each rank's gradients after its backward, and {name} (SyncBatchNorm) adds up "
                "those of all ranks in backward, as if they weighed the same: use BatchNorm, GroupNorm or LayerNorm, "
                "or leave out weighted=True and multiply each rank's mean loss by its samples * ranks / all samples"
            )


def refuse_unseen_steps(optimizers: Iterable[Optimizer]) -> None:
    """Raise TypeError for optimizers whose ``step()`` may use gradients that are not weighted, and nobody sees it."""
    require_hooks(
        optimizers,
        "weighted=True",
        ", so its step() could use gradients that DDP has not reduced, which are not weighted: attach the optimizer "
        "inside of it, or have its class call Optimizer.__init__",
    )


def refuse_model(ddp: DistributedDataParallel) -> None:
    """Raise TypeError or ValueError unless the gradients of ``ddp`` can go through the pipeline."""
    refuse_other_parallelism(ddp)
    if has_comm_hook(ddp):
        raise ValueError(
            "this DDP model has a communication hook already, and DDP takes only one: leave out the other "
            "register_comm_hook; if it is dear_hook, call detach(), and not between a forward and its backward, where "
            "DDP keeps the hook; or build a new DistributedDataParallel around ddp.module"
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
            "delay_all_reduce_named_params lists all parameters, so no gradient reaches the hook: leave the argument "
            "out. DDP does not wait for the reductions that it delays (torch 2.15.0)"
        )
    _refuse_parameters(ddp)


def _refuse_parameters(ddp: DistributedDataParallel) -> None:
    for name in sparse_modules(ddp):
        raise ValueError(
            f"{name}.weight has sparse gradients, which cannot be copied into a flat fusion buffer: build {name} "
            "with sparse=False"
        )
    named = managed_parameters(ddp)
    managed = {id(parameter) for _, parameter in named}
    for name, module in ddp.module.named_modules():
        # One without trained parameters is a function, as those that e3nn compiles its layers to.
        if isinstance(module, torch.jit.ScriptModule) and any(id(one) in managed for one in module.parameters()):
            raise ValueError(
                f"{name or 'the model'} is a TorchScript module, whose forward runs no hooks: use the module that it "
                "was scripted from, with torch.compile for speed"
            )
    for name, parameter in named:
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
    """Raise ValueError unless ``deferred_updates`` can drive every optimizer, and DDP may get other buckets."""
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
                f"none of the parameters of {kind} belong to this DDP model: build the optimizer from "
                "ddp.parameters(). If it trains fp32 copies of 16-bit parameters, train fp32 parameters under "
                "torch.autocast instead, or without the hook"
            )
        if ddp.gradient_as_bucket_view and _keeps_gradients(optimizer):
            raise ValueError(
                f"the state of {kind} keeps gradients that are views of DDP's buckets, which are other buckets from "
                "now on: keep clones (p.grad.clone()), attach before the first step, or leave out "
                "gradient_as_bucket_view"
            )


def _keeps_gradients(optimizer: Optimizer) -> bool:
    gradients = (p.grad for p in optimizer_parameters(optimizer) if p.grad is not None)
    return share_storage(tensors_in(list(dict.values(optimizer.state))), gradients)


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
