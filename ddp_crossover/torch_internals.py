"""Every use of torch that is not public, each behind one small function.

Checked on torch 2.11 to 2.15. Where a name is gone, the error says so instead of failing far away.
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
from torch._C._distributed_c10d import GradBucket as GradBucket  # dist.GradBucket, which has no stub
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
    """Run ``callback`` when the autograd graph task that is running has ended."""
    _private(Variable._execution_engine, "queue_callback")(callback)


def is_in_backward() -> bool:
    """Whether this thread runs a part of an autograd graph task."""
    return bool(_private(torch._C, "_current_graph_task_id")() != -1)


# Attributes of an optimizer in which it keeps the hooks around `step()`.
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_STATE_DICT_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_load_state_dict_pre_hooks")


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks can be put around its methods; a class that skips ``Optimizer.__init__`` has no room for them."""
    return all(hasattr(optimizer, name) for name in (*STEP_HOOKS, *_STATE_DICT_HOOKS))


def raw_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The optimizer's ``step`` without step hooks, profiler range or scheduler counters."""
    return _private(type(optimizer).step, "__wrapped__")  # type: ignore[no-any-return]


def has_raw_step(optimizer: Optimizer) -> bool:
    """Whether :func:`raw_step` is to be had, and ``step`` was not replaced on the instance."""
    step = vars(optimizer).get("step")
    # A learning-rate scheduler wraps `step` on the instance only to count the calls.
    replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    return hasattr(type(optimizer).step, "__wrapped__") and not replaced


def move_to_front(hooks_of: Optimizer, handle: RemovableHandle) -> None:
    """Make a step post-hook the first to run, so that users' post-hooks see gradients in place."""
    _private(hooks_of, "_optimizer_step_post_hooks").move_to_end(handle.id, last=False)


def step_pre_hooks(optimizer: Optimizer) -> list[Any]:
    """The step pre-hooks of an optimizer, in the order in which they run."""
    return list(_private(optimizer, "_optimizer_step_pre_hooks").values())


def process_group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The timeout with which ``group`` was made, so that our own group gets the same."""
    backend = _private(group, "_get_backend")(device)
    return _private(backend.options, "_timeout")  # type: ignore[no-any-return]


def comm_hooks_of(ddp: DistributedDataParallel) -> list[Any]:
    """Communication hooks that the user has registered already, and the state of each; not those of C++."""
    return list(_private(ddp, "_comm_hooks"))


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Whether ``with ddp.join():`` is running."""
    return bool(_private(_private(ddp, "_join_config"), "enable"))


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether DDP's reducer has a communication hook, of Python or of C++."""
    return "comm_hook" in _private(ddp, "_get_ddp_logging_data")()


def has_run_forward(ddp: DistributedDataParallel) -> bool:
    """Whether the model has been called since it was built."""
    return bool(_private(ddp, "_lazy_init_ran"))


def forget_comm_hooks(ddp: DistributedDataParallel) -> None:
    """Take all out of what is copied and pickled along with the model. The reducer keeps the one it has."""
    _private(ddp, "_comm_hooks").clear()


def managed_parameters(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """Named parameters that DDP reduces, in its own order, each once."""
    ignored: set[str] = _private(ddp, "parameters_to_ignore")
    return [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def bucket_cap_bytes(ddp: DistributedDataParallel) -> int:
    """Above which size DDP starts a new bucket."""
    return int(_private(ddp, "bucket_bytes_cap"))


def rebuild_buckets(ddp: DistributedDataParallel, cap_bytes: int | None = None) -> None:
    """Give DDP a new reducer, with no hook, in the way of its own ``__setstate__``.

    The attributes stay: dynamo's DDPOptimizer cuts graphs by them.

    Args:
        ddp: the model.
        cap_bytes: largest size of its buckets; None for those that the user has asked for.
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
        # The new reducer learns the graph in a first iteration of its own, also if DDP has had one.
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()  # type: ignore[union-attr]


def is_updated_in_backward(parameter: torch.nn.Parameter) -> bool:
    """Whether an optimizer steps as soon as this gradient is accumulated."""
    return hasattr(parameter, "_in_backward_optimizers")


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calling the module runs code that ``torch.compile`` has made: of it, in it, or of its ``forward``."""
    return is_compiled_in_place(module) or _has_compiled_forward(module)


def _has_compiled_forward(module: torch.nn.Module) -> bool:
    """Also that of ``torch.compile(module)``, and one that a decorator has compiled."""
    return hasattr(module.forward, "_torchdynamo_orig_callable")


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called: calling the module then runs none of its hooks eagerly."""
    return getattr(module, "_compiled_call_impl", None) is not None


def call_around_compiled(
    module: torch.nn.Module, before: Callable[[], None], after: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Run ``before`` and ``after`` outside of the code of a compiled module; returns the undoing."""
    # Attributes of the object, and no hooks, which would keep fused paths from running.
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
            return self._compiled(*args, **kwargs)  # a part of what runs in between already
        self._before()
        try:
            return self._compiled(*args, **kwargs)
        finally:
            self._after()

    def __reduce__(self) -> Any:
        # A copy of the module gets what plain DDP's would get; a method is bound to the copy.
        return _unchanged, (self._compiled,)


def _unchanged(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled


def tensors_in(output: Any) -> list[torch.Tensor]:
    """All tensors in what a module has returned: in tuples, lists and dicts of any depth."""
    leaves = _private(_private(torch.utils, "_pytree"), "tree_leaves")(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def allow_foreach(tensor_class: type[torch.Tensor]) -> None:
    """Let torch's foreach implementations take tensors of this class, as DTensor does for itself.

    On CUDA the stock ``clip_grad_norm_`` and optimizers go tensor by tensor, and round differently, for classes that
    are not on the lists.
    """
    for module in (_private(torch.utils, "_foreach_utils"), sys.modules[Optimizer.__module__]):
        supported = _private(module, "_foreach_supported_types")
        if tensor_class not in supported:
            supported.append(tensor_class)


def outside_of_modes(job: Callable[[], None], stream: torch.cuda.Stream | None) -> None:
    """Run ``job`` where no mode, functorch transform or ``torch.jit.trace`` of the caller sees what it does.

    All of these belong to a thread, so where there are any a new thread has none. That takes 0.1 ms.

    Args:
        job: what to do.
        stream: the CUDA stream to do it on, or None.
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
        thread.join()  # Ctrl-C must not leave the job half done
    if errors:
        raise errors[0]


def is_traced() -> bool:
    """Whether ``torch.jit.trace`` records what this thread does."""
    return bool(_private(torch.jit, "is_tracing")())


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Number of C++ references to a storage: one for each tensor, and a constant."""
    return torch._C._storage_Use_Count(storage._cdata)


def references_to_memory(tensor: torch.Tensor) -> int:
    """Number of references in C++ and Python to a tensor and to its storage, plus a constant."""
    storage = tensor.untyped_storage()
    of_storage = torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)
    return of_storage + tensor._use_count() + sys.getrefcount(tensor)


def references_to_bucket_view(gradients: int) -> int:
    """How many references there are to a gradient that is a view of a DDP bucket, besides those to any ``.grad``.

    DDP keeps the bucket itself, what the hook has returned, and two views of each gradient: its place in the bucket,
    which ``.grad`` is too, and its place in the result.

    Args:
        gradients: how many of them are in the bucket.
    """
    return 2 + 2 * gradients


def called_by_compiled_code() -> bool:
    """Whether some caller on the stack was compiled by ``torch.compile``, so that what we return to may be, too."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("_dynamo/eval_frame.py"):
            return True
        frame = frame.f_back
    return False


def on_compile_start(callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` before dynamo takes in the objects that a frame uses; returns the undoing.

    Dynamo's own start callbacks are forgotten by ``torch.compiler.reset()``, and ``torch.export`` has none. Checked on
    torch 2.11 to 2.15.
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
        # Optimizers ask for this flag, which torch 2.15 has set by now, and would add up in another way.
        before, torch.compiler._is_compiling_flag = _private(torch.compiler, "_is_compiling_flag"), False
        try:
            for callback in self.callbacks:
                callback()
        finally:
            torch.compiler._is_compiling_flag = before
        return self._compile_frame(*args, **kwargs)


def settle_before_use(settle: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let ``settle`` say with which tensor functions go on that ask no tensor for its ``__torch_function__``.

    These are ``torch.func`` and ``vmap``, ``torch.utils.swap_tensors``, ``to_dlpack``, ``nn.Parameter(tensor)``. Stays
    for the rest of the process.
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
    """A tensor that looks like ``memory``: C++ that reads or writes its values raises a RuntimeError.

    None for a tensor without elements, and where torch was built for CPUs only, which lacks what it takes. Checked on
    torch 2.11 to 2.15.
    """
    set_message = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if set_message is None or not memory.numel():
        return None
    own = memory.untyped_storage()
    construct = _private(torch._C, "_construct_storage_from_data_pointer")
    storage = construct(own.data_ptr(), memory.device, own.nbytes())  # owns nothing, is no reference to it
    cover = torch.empty(0, dtype=memory.dtype, device=memory.device)
    cover.set_(storage, memory.storage_offset(), memory.shape, memory.stride())
    set_message(storage._cdata, message)
    return cover


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """``tensor.data = data`` that asks no class, and that no signal handler comes in between of. Takes 0.2 us."""
    torch._C._disabled_torch_function_impl(_SET_DATA, (), (tensor, data), {})


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Profilers do not hear of what happens within; one that records values would follow the address of a cover."""
    enable = _private(torch.autograd, "_enable_record_function")
    enable(False)
    try:
        yield
    finally:
        enable(True)


def keeps_overwritten_values() -> bool:
    """Whether ``with torch.autograd.graph.allow_mutation_on_saved_tensors():`` is running."""
    return bool(_private(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled"))


def use_count(tensor: torch.Tensor) -> int:
    """Number of C++ references to a tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._use_count()
