"""Shows every operation that a thread gives to torch, and what each operation is, by its schema."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ddp_crossover.torch_internals.private import private

_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem")
# They give Python the memory of a tensor; none of them is an operation of torch.
_OPEN_MEMORY = ("numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "share_memory_")
_DISPATCH: Any = importlib.import_module("torch.utils._python_dispatch")


class Operation(NamedTuple):
    """What torch knows of an operation.

    Attributes:
        name: its name, as ``aten.add_.Tensor``.
        base: its name in its module, without overload, ``_foreach_`` and the underscore of an in-place one.
        written: positions of arguments that it writes, and names of those given by keyword; True for one that is only
            written, as ``out=`` is.
        is_constant: whether what it returns depends on sizes only.
        is_listwise: whether it treats lists of tensors position by position.
        is_random: whether it draws random numbers.
        communicates: whether it talks to other ranks.
        is_revealing: whether Python gets something that depends on values: a number, a truth, or a size.
        is_elementwise: whether each element that it returns depends on the elements in that place only.
    """

    name: str
    base: str
    written: Mapping[int | str, bool]
    is_constant: bool
    is_listwise: bool
    is_random: bool
    communicates: bool
    is_revealing: bool
    is_elementwise: bool


@functools.cache
def operation(function: Any) -> Operation:
    """Describe an operator of ``torch.ops``."""
    schema = private(function, "_schema")
    namespace, _, base = schema.name.partition("::")
    is_listwise = base.startswith(("_foreach_", "_fused_"))
    base = base.removeprefix("_foreach_").rstrip("_")
    written: dict[int | str, bool] = {}
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            only_written = argument.is_out or base in ("copy", "fill", "zero")
            written[place] = written[argument.name] = only_written
    types = [str(each.type) for each in schema.returns]
    is_revealing = torch.Tag.dynamic_output_shape in function.tags or (
        bool(types) and not any("Tensor" in each or "classes" in each for each in types)
    )
    return Operation(
        str(function),
        base,
        written,
        is_constant=base in _CONSTANT,
        is_listwise=is_listwise,
        is_random=torch.Tag.nondeterministic_seeded in function.tags,
        communicates=namespace in _COMMUNICATION,
        is_revealing=is_revealing,
        is_elementwise=not is_revealing and (base in _ELEMENTWISE or (namespace == "aten" and _is_pointwise(base))),
    )


_CONSTANT = frozenset(
    ("empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
)
# Beside those that torch marks as pointwise.
_ELEMENTWISE = frozenset(
    (
        *("_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd", "_reshape_alias", "_to_copy", "_unsafe_view"),
        *("addcdiv", "addcmul", "alias", "clamp_max", "clamp_min", "clone", "copy", "detach", "fill", "index_put"),
        *("lerp", "lift_fresh", "maximum", "minimum", "reshape", "view", "zero"),
    )
)


def _is_pointwise(base: str) -> bool:
    packet = getattr(torch.ops.aten, base, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


# Correctly rounded, or not rounded at all. Others (pow, atan2, sigmoid, ...) have two implementations on a CPU: one for
# whole vectors and one for the last elements of a loop, with other last bits.
_ROUNDED_ALIKE = frozenset(
    (
        *("abs", "add", "addcdiv", "addcmul", "alias", "bitwise_and", "bitwise_not", "bitwise_or", "ceil", "clamp"),
        *("clamp_max", "clamp_min", "clip", "clone", "copy", "copysign", "detach", "div", "divide", "eq", "fill"),
        *("floor", "floor_divide", "fmax", "fmin", "fmod", "frac", "ge", "gt", "heaviside", "index_put", "isfinite"),
        *("isinf", "isnan", "isneginf", "isposinf", "le", "lerp", "lift_fresh", "logical_and", "logical_not"),
        *(
            "logical_or",
            "logical_xor",
            "lt",
            "masked_fill",
            "maximum",
            "minimum",
            "mul",
            "multiply",
            "nan_to_num",
            "ne",
        ),
        *("neg", "reciprocal", "relu", "remainder", "reshape", "round", "rsqrt", "rsub", "sgn", "sign", "signbit"),
        *("sqrt", "square", "sub", "subtract", "threshold", "true_divide", "trunc", "view", "where", "zero"),
        *("_reshape_alias", "_to_copy", "_unsafe_view"),
    )
)
_EXACT_POWERS = (1, 2, 0.5)  # as multiplications and a square root


def rounds_by_place(operation: Operation, arguments: Sequence[Any]) -> bool:
    """Whether an elementwise operation may give an element other last bits on a slice than on the whole tensor."""
    if any(tensor.device.type != "cpu" for tensor in tensors_of(arguments)) or operation.base in _ROUNDED_ALIKE:
        return False
    return not (operation.base == "pow" and arguments[-1] in _EXACT_POWERS)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in an argument of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each)


class OperationWatch:
    """Calls functions around each operation of this thread, from ``start`` to ``stop``.

    Args:
        before: called before each operation, and may raise so that it does not run.
        after: called with the operation, its arguments and its result.
        opened: called with a tensor whose values Python is about to get without an operation, and how; and with a
            generator that a function of torch is given, of which an operation gets another Python object.
    """

    def __init__(
        self,
        before: Callable[[Operation], None],
        after: Callable[[Operation, tuple[Any, ...], Mapping[str, Any], Any], None],
        opened: Callable[[Tensor | torch.Generator, str], None],
    ) -> None:
        self._dispatch = _Dispatched(before, after)
        self._functions = _Called(opened, self._copied)
        self._after = after
        self._thread = 0

    def start(self) -> None:
        self._thread = threading.get_ident()
        self._dispatch.look(True)
        self._functions.look(True)
        self._functions.__enter__()
        self._dispatch.__enter__()

    def _copied(self, copy: Callable[[], Tensor], tensor: Tensor) -> Tensor:
        """``deepcopy`` of a tensor, which copies its storage past torch's operators, is shown as a clone."""
        self._dispatch.look(False)
        made = copy()
        self._dispatch.look(True)
        with private(torch._C, "DisableTorchFunction")():
            self._after(operation(torch.ops.aten.clone.default), (tensor,), {}, made)
        return made

    def stop(self) -> None:
        """End the watch; also one that an error has left on this thread's stacks of modes."""
        if self._thread != threading.get_ident():
            return
        if private(_DISPATCH, "_get_current_dispatch_mode")() is self._dispatch:
            self._dispatch.__exit__(None, None, None)
        if private(torch.overrides, "_get_current_function_mode")() is self._functions:
            self._functions.__exit__(None, None, None)
        # If another mode is above them, they stay, and see no more.
        self._dispatch.look(False)
        self._functions.look(False)


class _Dispatched(_DISPATCH.TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, before: Callable[[Operation], None], after: Callable[..., None]) -> None:
        super().__init__()
        self._before = before
        self._after = after
        self._looks = False

    def look(self, looks: bool) -> None:
        self._looks = looks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._looks or func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        known = operation(func)
        self._before(known)
        out = func(*args, **kwargs)
        with private(torch._C, "DisableTorchFunction")():
            self._after(known, args, kwargs, out)
        return out


class _Called(TorchFunctionMode):
    def __init__(
        self,
        opened: Callable[[Tensor | torch.Generator, str], None],
        copied: Callable[[Callable[[], Tensor], Tensor], Tensor],
    ) -> None:
        super().__init__()
        self._opened = opened
        self._copied = copied
        self._looks = False

    def look(self, looks: bool) -> None:
        self._looks = looks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self._looks and args and isinstance(args[0], Tensor):
            if name in _OPEN_MEMORY or name == "tolist":
                self._opened(args[0], name)
            # What it holds is copied with it, by its own operations.
            if func is Tensor.__deepcopy__ and args[0].grad is None and not vars(args[0]):
                return self._copied(functools.partial(func, *args), args[0])
        for value in (*args, *(kwargs or {}).values()) if self._looks else ():
            if isinstance(value, torch.Generator):
                self._opened(value, name)
        return func(*args, **(kwargs or {}))


def number_of(generator: torch.Generator) -> int:
    """What all Python objects of a generator have in common, while it lives."""
    return int(private(generator, "_cdata"))
