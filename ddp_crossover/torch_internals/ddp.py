"""What DDP does not offer: its hooks, its buckets, its process group's timeout."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket as GradBucket  # dist.GradBucket has no type stub
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.torch_internals.groups import backend_of
from ddp_crossover.torch_internals.private import private, replaced


def process_group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout with which ``group`` was made, so that our own group gets the same."""
    return private(backend_of(group, device).options, "_timeout")  # type: ignore[no-any-return]


def comm_hooks_of(ddp: DistributedDataParallel) -> list[Any]:
    """Return the (hook, state) pairs of all communication hooks that were registered from Python."""
    return list(private(ddp, "_comm_hooks"))


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Whether ``with ddp.join():`` is active."""
    return bool(private(private(ddp, "_join_config"), "enable"))


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether DDP's reducer has a communication hook, in Python or in C++."""
    return "comm_hook" in private(ddp, "_get_ddp_logging_data")()


def is_in_training_mode(ddp: DistributedDataParallel) -> bool:
    """Whether DDP or the module in it is: Lightning leaves DDP itself in evaluation mode after a validation."""
    return ddp.training or ddp.module.training


def may_await_backward(ddp: DistributedDataParallel) -> bool:
    """Whether the last forward has prepared a backward that reduces, as none does in ``no_grad()``."""
    return bool(private(ddp, "_lazy_init_ran")) and ddp.require_forward_param_sync


def forget_comm_hooks(ddp: DistributedDataParallel) -> None:
    """Clear DDP's list of hooks, which is copied and pickled with the model; the reducer keeps its hook."""
    private(ddp, "_comm_hooks").clear()


def no_comm_hooks(ddp: DistributedDataParallel) -> contextlib.AbstractContextManager[None]:
    """Context in which DDP's list of hooks is another one, and empty: copies and pickles made there have none."""
    return replaced(ddp, "_comm_hooks", [])


@contextlib.contextmanager
def runs_instead_of_model(ddp: DistributedDataParallel, run: Callable[..., Any]) -> Iterator[None]:
    """Context in which DDP's forward calls ``run`` where it would call the model."""
    private(ddp, name := "_run_ddp_forward")
    vars(ddp)[name] = run
    try:
        yield
    finally:
        del vars(ddp)[name]


def managed_parameters(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the named parameters that DDP reduces, in the model's order, each once.

    These are the parameters that required a gradient when DDP was built. What is frozen, thawed or replaced afterwards
    changes nothing: DDP goes on reducing what it was built with.
    """
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return [
        (names.get(id(parameter), f"parameter {number} of DDP, which has left the model,"), parameter)
        for number, parameter in enumerate(_in_reducer(ddp))
    ]


def unmanaged_parameters(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the named parameters, frozen ones too, that DDP neither reduces nor was told to ignore."""
    ignored: set[str] = private(ddp, "parameters_to_ignore")
    reduced = set(map(id, _in_reducer(ddp)))
    return [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if name not in ignored and id(parameter) not in reduced
    ]


def _in_reducer(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters of DDP's reducer, of which nothing in Python keeps a list."""
    as_built: list[torch.nn.Parameter] = private(ddp, "_module_parameters")  # frozen ones, too
    number = private(ddp, "_get_ddp_logging_data")()["num_parameter_tensors"]
    if number == len(as_built) and not private(ddp, "parameters_to_ignore"):
        return as_built
    if sparse_modules(ddp):  # torch cannot show the buckets of these, and they are refused
        return [parameter for parameter in as_built if parameter.requires_grad]
    # These buckets are as large as the gradients; they are freed at once.
    buckets: list[GradBucket] = private(ddp.reducer, "_get_zeros_like_grad_buckets")()
    reduced: dict[int, Any] = {id(parameter): parameter for bucket in buckets for parameter in bucket.parameters()}
    # DDP may reduce more than it says: a parameter of the outermost module is reduced although it is to be ignored.
    in_order = (reduced.pop(id(parameter), None) for parameter in [*as_built, *ddp.module.parameters()])
    return [parameter for parameter in in_order if parameter is not None] + list(reduced.values())


def sparse_modules(ddp: DistributedDataParallel) -> list[str]:
    """Return the names of the modules whose gradients are sparse."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [name for name, module in ddp.module.named_modules() if isinstance(module, kinds) and module.sparse]


def bucket_cap_bytes(ddp: DistributedDataParallel) -> int:
    """Return the size in bytes above which DDP starts a new bucket."""
    return int(private(ddp, "bucket_bytes_cap"))


@torch.inference_mode(mode=False)  # or the buckets could be used in no backward
def rebuild_buckets(ddp: DistributedDataParallel, cap_bytes: int | None = None) -> None:
    """Give DDP a new reducer without a hook, for the same parameters as the one that it has.

    DDP's own ``__setstate__`` does so for those that require a gradient now. DDP's attributes keep the user's bucket
    size, because dynamo's DDPOptimizer splits graphs by it.

    Args:
        ddp: the model.
        cap_bytes: maximum bucket size in bytes; None for the size that the user has set.
    """
    settings: dict[str, Any] = {"bucket_bytes_cap": cap_bytes}
    if cap_bytes is None:
        settings = {}
    elif hasattr(ddp, "_bucket_config"):  # from torch 2.13 on
        settings["_bucket_config"] = dataclasses.replace(
            ddp._bucket_config,
            bucket_bytes_cap=cap_bytes,
            per_bucket_bytes_caps=(),
            first_bucket_bytes_cap=cap_bytes,
        )
    else:
        settings |= {"bucket_bytes_cap_default": False, "bucket_bytes_cap_list": []}
    before = {name: private(ddp, name) for name in settings}
    managed = managed_parameters(ddp)
    parameters = [parameter for _, parameter in managed]
    names = {number: name for number, (name, _) in enumerate(managed)}
    is_sparse = [False] * len(managed)  # models with sparse gradients are refused
    private(ddp, "_remove_autograd_hooks")()
    vars(ddp).update(settings)
    try:
        with _thawed(parameters):
            private(ddp, "_ddp_init_helper")(parameters, is_sparse, names, ddp.static_graph)
    finally:
        vars(ddp).update(before)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()  # type: ignore[union-attr]
        if private(ddp, "_static_graph_delay_allreduce_enqueued"):  # DDP has learned the graph before
            vars(ddp)["_pre_forward"] = _LearnsGraphAnew(ddp, cap_bytes)


@contextlib.contextmanager
def _thawed(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Context in which all parameters require a gradient: only then autograd has a node on which DDP puts its hook."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad = True
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad = False


@torch.inference_mode(mode=False)  # in which autograd has no nodes
def gradient_accumulators(parameters: Sequence[torch.nn.Parameter]) -> list[Node]:
    """Return the autograd nodes on which a reducer that is built now puts its hooks, one of each parameter.

    ``register_parametrization()``, ``set_()`` and casts give a parameter another one, which a reducer from before does
    not know: it takes the parameter for unused. A new reducer would reduce it.
    """
    with _thawed(parameters):
        return [get_gradient_edge(parameter).node for parameter in parameters]


def rebuild_under_hook(ddp: DistributedDataParallel, cap_bytes: int | None) -> None:
    """Give DDP a new reducer with the hooks that it has, see :func:`rebuild_buckets`."""
    hooks = comm_hooks_of(ddp)
    rebuild_buckets(ddp, cap_bytes)
    forget_comm_hooks(ddp)
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)


class _LearnsGraphAnew:
    """In place of DDP's ``_pre_forward`` until a new reducer may learn a static graph, which its predecessor knew.

    A reducer learns the graph in the first backward of its life, and has to reduce in that one: a script that begins
    with ``no_sync()`` fails. One that comes to it later does not, so until the next forward that reduces no backward is
    announced as the first one. Those in between have been counted, and only another reducer has not counted them.
    """

    def __init__(self, ddp: DistributedDataParallel, cap_bytes: int | None) -> None:
        self._ddp = weakref.ref(ddp)
        self._cap_bytes = cap_bytes
        self._has_counted = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ddp = self._ddp()
        assert ddp is not None  # the model is running
        torch.compiler.disable(self._forward_begins)(ddp)
        return private(type(ddp), "_pre_forward")(ddp, *args, **kwargs)

    def _forward_begins(self, ddp: DistributedDataParallel) -> None:
        if not torch.is_grad_enabled():
            return
        if not ddp.require_backward_grad_sync:
            self._has_counted = True
            return
        del ddp._pre_forward
        ddp._static_graph_delay_allreduce_enqueued = False
        if self._has_counted:
            rebuild_under_hook(ddp, self._cap_bytes)

    def __reduce__(self) -> Any:
        return getattr, (self._ddp(), "_pre_forward")  # copies and pickles have DDP's own


def is_updated_in_backward(parameter: torch.nn.Parameter) -> bool:
    """Whether an optimizer updates this parameter inside backward, as soon as its gradient is accumulated."""
    return hasattr(parameter, "_in_backward_optimizers")


def is_slice_of_dtensor(parameter: torch.nn.Parameter) -> bool:
    """Whether DDP has put this parameter in place of a DTensor, as it does over a slice of a larger device mesh."""
    return hasattr(parameter, "_st_info")


def is_wrapped_by_replicate(module: object) -> bool:
    """Whether one of ``torch.distributed._composable``'s two ``replicate()`` has changed a module's class."""
    makers = ("torch.distributed._composable.replicate", "torch.distributed._composable.replicate_with_fsdp")
    return any(base.__module__ in makers for base in type(module).__mro__)


def references_to_bucket_view(gradients: int) -> int:
    """Number of references that DDP has to the memory of a bucket, besides those that any ``.grad`` has.

    DDP keeps the bucket itself, the result of the hook, and two views for each gradient: one of its place in the
    bucket, which ``.grad`` shares with ``gradient_as_bucket_view``, and one of its place in the result.

    Args:
        gradients: number of gradients in the bucket.
    """
    return 2 + 2 * gradients
