"""Every private API of torch that this package uses, each behind one small function.

Checked on torch 2.11 to 2.15. If a name is missing, the error says so here, instead of failing far away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket as GradBucket  # dist.GradBucket has no type stub
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

CHECKED_ON = "2.11 to 2.15"


def _private(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise RuntimeError(
            f"ddp_crossover needs {getattr(owner, '__name__', type(owner).__name__)}.{name}, which torch "
            f"{torch.__version__} does not have (checked on torch {CHECKED_ON}); "
            "install one of these versions, or train without the hook"
        ) from None


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the current autograd graph task has ended."""
    _private(Variable._execution_engine, "queue_callback")(callback)


def is_in_backward() -> bool:
    """Whether this thread is running part of an autograd graph task."""
    return bool(_private(torch._C, "_current_graph_task_id")() != -1)


# Attributes in which an optimizer keeps the hooks around its `step()`.
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_STATE_DICT_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_load_state_dict_pre_hooks")


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether the optimizer takes hooks; one whose class skips ``Optimizer.__init__`` does not."""
    return all(hasattr(optimizer, name) for name in (*STEP_HOOKS, *_STATE_DICT_HOOKS))


def raw_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the unbound ``step`` of the optimizer's class, without hooks, profiler range or scheduler counters."""
    return _private(type(optimizer).step, "__wrapped__")  # type: ignore[no-any-return]


def has_raw_step(optimizer: Optimizer) -> bool:
    """Whether :func:`raw_step` is available and ``step`` was not replaced on the instance."""
    step = vars(optimizer).get("step")
    # A learning-rate scheduler also wraps `step` on the instance, but only to count calls.
    replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    return hasattr(type(optimizer).step, "__wrapped__") and not replaced


def move_to_front(hooks_of: Optimizer, handle: RemovableHandle) -> None:
    """Make a step post-hook run first, so that users' post-hooks see gradients in place."""
    _private(hooks_of, "_optimizer_step_post_hooks").move_to_end(handle.id, last=False)


def step_pre_hooks(optimizer: Optimizer) -> list[Any]:
    """Return the step pre-hooks of an optimizer, in the order in which they run."""
    return list(_private(optimizer, "_optimizer_step_pre_hooks").values())


def process_group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout with which ``group`` was made, so that our own group gets the same."""
    backend = _private(group, "_get_backend")(device)
    return _private(backend.options, "_timeout")  # type: ignore[no-any-return]


def comm_hooks_of(ddp: DistributedDataParallel) -> list[Any]:
    """Return the (hook, state) pairs of all communication hooks that were registered from Python."""
    return list(_private(ddp, "_comm_hooks"))


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Whether ``with ddp.join():`` is active."""
    return bool(_private(_private(ddp, "_join_config"), "enable"))


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether DDP's reducer has a communication hook, in Python or in C++."""
    return "comm_hook" in _private(ddp, "_get_ddp_logging_data")()


def has_run_forward(ddp: DistributedDataParallel) -> bool:
    """Whether the model has been called since it was built."""
    return bool(_private(ddp, "_lazy_init_ran"))


def forget_comm_hooks(ddp: DistributedDataParallel) -> None:
    """Clear DDP's list of hooks, which is copied and pickled with the model; the reducer keeps its hook."""
    _private(ddp, "_comm_hooks").clear()


def managed_parameters(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the named parameters that DDP reduces, in DDP's order, each once."""
    ignored: set[str] = _private(ddp, "parameters_to_ignore")
    return [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def bucket_cap_bytes(ddp: DistributedDataParallel) -> int:
    """Return the size in bytes above which DDP starts a new bucket."""
    return int(_private(ddp, "bucket_bytes_cap"))


def rebuild_buckets(ddp: DistributedDataParallel, cap_bytes: int | None = None) -> None:
    """Give DDP a new reducer without a hook, as its own ``__setstate__`` does.

    DDP's attributes keep the user's bucket size, because dynamo's DDPOptimizer splits graphs by it.

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
    before = {name: _private(ddp, name) for name in settings}
    _private(ddp, "_remove_autograd_hooks")()
    parameters, is_sparse = _private(ddp, "_build_params_for_reducer")()
    names = _private(ddp, "_build_debug_param_to_name_mapping")(parameters)
    vars(ddp).update(settings)
    try:
        _private(ddp, "_ddp_init_helper")(parameters, is_sparse, names, ddp.static_graph)
    finally:
        vars(ddp).update(before)
    if ddp.static_graph:
        # The new reducer learns the graph in its own first iteration, even if DDP has had one before.
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()  # type: ignore[union-attr]


def is_updated_in_backward(parameter: torch.nn.Parameter) -> bool:
    """Whether an optimizer updates this parameter inside backward, as soon as its gradient is accumulated."""
    return hasattr(parameter, "_in_backward_optimizers")


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether the module is compiled: by ``torch.compile(module)``, ``module.compile()`` or a compiled ``forward``."""
    return is_compiled_in_place(module) or _has_compiled_forward(module)


def _has_compiled_forward(module: torch.nn.Module) -> bool:
    """Whether ``forward`` is compiled, also by ``torch.compile(module)`` or by a decorator."""
    return hasattr(module.forward, "_torchdynamo_orig_callable")


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called, after which no hook of the module runs eagerly."""
    return getattr(module, "_compiled_call_impl", None) is not None


def call_around_compiled(
    module: torch.nn.Module, before: Callable[[], None], after: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Run ``before`` and ``after`` around a compiled module, outside of its graph; returns the undo function."""
    # Set an attribute of the module instead of hooks, which would disable fused fast paths.
    name = "_compiled_call_impl" if is_compiled_in_place(module) else "forward"
    own = vars(module).get(name)
    call = vars(module)[name] = _AroundCompiled(_private(module, name), before, after)

    def undo() -> None:
        if vars(module).get(name) is call:
            vars(module)[name] = own
            if own is None:
                del vars(module)[name]

    return undo


class _AroundCompiled:
    def __init__(self, compiled: Callable[..., Any], before: Callable[[], None], after: Callable[[], None]) -> None:
        self._compiled = compiled
        self._before = before
        self._after = after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._compiled(*args, **kwargs)  # traced into outer compiled code, which is wrapped itself
        self._before()
        try:
            return self._compiled(*args, **kwargs)
        finally:
            self._after()

    def __reduce__(self) -> Any:
        # A copy of the module gets the unwrapped callable, as with plain DDP; a method is bound to the copy.
        return _unchanged, (self._compiled,)


def _unchanged(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return all tensors in a module's output, inside tuples, lists and dicts of any depth."""
    leaves = _private(_private(torch.utils, "_pytree"), "tree_leaves")(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def allow_foreach(tensor_class: type[torch.Tensor]) -> None:
    """Let torch's foreach implementations accept tensors of this class, as DTensor does for itself.

    For classes that are not on torch's lists, the stock ``clip_grad_norm_`` and optimizers on CUDA process one tensor
    at a time, and round differently.
    """
    for module in (_private(torch.utils, "_foreach_utils"), sys.modules[Optimizer.__module__]):
        supported = _private(module, "_foreach_supported_types")
        if tensor_class not in supported:
            supported.append(tensor_class)


def outside_of_modes(job: Callable[[], None], stream: torch.cuda.Stream | None) -> None:
    """Run ``job`` out of sight of the caller's modes, functorch transforms and ``torch.jit.trace``.

    All of these belong to a thread, so if any is active, ``job`` runs on a new thread, which takes 0.1 ms. Exceptions
    of ``job`` are raised here.

    Args:
        job: the function to run.
        stream: the CUDA stream to run it on if a new thread is needed, or None.
    """
    depth_of_modes = (
        _private(torch._C, "_len_torch_dispatch_stack")() + _private(torch._C, "_len_torch_function_stack")()
    )
    is_in_transform = _private(torch._C._functorch, "peek_interpreter_stack")() is not None
    if not (depth_of_modes or is_in_transform or is_traced()):
        job()
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.stream(stream):  # does nothing for None
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
    return bool(_private(torch.jit, "is_tracing")())


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Number of C++ references to a storage: one for each tensor, plus a constant."""
    return torch._C._storage_Use_Count(storage._cdata)


def references_to_memory(tensor: torch.Tensor) -> int:
    """Number of references in C++ and Python to a tensor and to its storage, plus a constant."""
    storage = tensor.untyped_storage()
    of_storage = storage_use_count(storage) + sys.getrefcount(storage)
    return of_storage + tensor._use_count() + sys.getrefcount(tensor)


def references_to_bucket_view(gradients: int) -> int:
    """Number of references that DDP holds to the memory of a bucket, besides those that any ``.grad`` has.

    DDP keeps the bucket itself, the result of the hook, and two views for each gradient: one of its place in the
    bucket, which ``.grad`` shares with ``gradient_as_bucket_view``, and one of its place in the result.

    Args:
        gradients: number of gradients in the bucket.
    """
    return 2 + 2 * gradients


def called_by_compiled_code() -> bool:
    """Whether ``torch.compile`` is on the call stack, so that the code we return to may be compiled."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("_dynamo/eval_frame.py"):
            return True
        frame = frame.f_back
    return False


def on_compile_start(callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` before dynamo reads the objects that a frame uses; returns the undo function.

    Not done with dynamo's own start callbacks, because ``torch.compiler.reset()`` clears them and ``torch.export`` does
    not call them. Checked on torch 2.11 to 2.15.
    """
    convert_frame: Any = importlib.import_module("torch._dynamo.convert_frame")
    compile_frame = _private(convert_frame, "compile_frame")
    if not isinstance(compile_frame, _CallBefore):
        compile_frame = convert_frame.compile_frame = _CallBefore(compile_frame)
    compile_frame.callbacks.append(callback)
    return lambda: compile_frame.callbacks.remove(callback)


class _CallBefore:
    def __init__(self, compile_frame: Callable[..., Any]) -> None:
        self._compile_frame = compile_frame
        self.callbacks: list[Callable[[], None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Clear this flag, which torch 2.15 has set by now: optimizers that see it would add up in another way.
        before, torch.compiler._is_compiling_flag = _private(torch.compiler, "_is_compiling_flag"), False
        try:
            for callback in self.callbacks:
                callback()
        finally:
            torch.compiler._is_compiling_flag = before
        return self._compile_frame(*args, **kwargs)


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
        take_in = _private(owner, name)
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


def cover_of(memory: torch.Tensor, message: str) -> torch.Tensor | None:
    """Return a tensor that looks like ``memory``, but raises RuntimeError if C++ reads or writes its values.

    None for a tensor without elements, and if torch was built for CPUs only, because that lacks the functions for it.
    Checked on torch 2.11 to 2.15.

    Args:
        memory: tensor whose dtype, device, shape, strides and address the result has.
        message: text of the RuntimeError.
    """
    set_message = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if set_message is None or not memory.numel():
        return None
    own = memory.untyped_storage()
    construct = _private(torch._C, "_construct_storage_from_data_pointer")
    storage = construct(own.data_ptr(), memory.device, own.nbytes())  # owns no memory, counts as no reference
    cover = torch.empty(0, dtype=memory.dtype, device=memory.device)
    cover.set_(storage, memory.storage_offset(), memory.shape, memory.stride())
    set_message(storage._cdata, message)
    return cover


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Set ``tensor.data`` without a class look-up, in one C call that no signal handler interrupts; takes 0.2 us."""
    torch._C._disabled_torch_function_impl(_SET_DATA, (), (tensor, data), {})


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Hide operators in this context from profilers: one that records values would read from a cover's address."""
    enable = _private(torch.autograd, "_enable_record_function")
    enable(False)
    try:
        yield
    finally:
        enable(True)


def keeps_overwritten_values() -> bool:
    """Whether ``with torch.autograd.graph.allow_mutation_on_saved_tensors():`` is active."""
    return bool(_private(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled"))


def use_count(tensor: torch.Tensor) -> int:
    """Number of C++ references to a tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._use_count()
