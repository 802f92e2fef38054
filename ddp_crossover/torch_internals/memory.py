"""References to memory, and memory that torch refuses to access."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ddp_crossover.torch_internals.private import private

_USE_COUNT: Callable[[torch.Tensor], int] = private(torch.Tensor, "_use_count")
_STORAGE_USE_COUNT: Callable[[int], int] = private(torch._C, "_storage_Use_Count")


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Number of C++ references to a storage: one for each tensor, plus a constant."""
    return _STORAGE_USE_COUNT(storage._cdata)


def references_to_memory(tensor: torch.Tensor) -> int:
    """Number of references in C++ and Python to a tensor and to its storage, plus a constant."""
    storage = tensor.untyped_storage()
    of_storage = storage_use_count(storage) + sys.getrefcount(storage)
    return of_storage + _USE_COUNT(tensor) + sys.getrefcount(tensor)


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
    construct = private(torch._C, "_construct_storage_from_data_pointer")
    storage = construct(own.data_ptr(), memory.device, own.nbytes())  # owns no memory, counts as no reference
    cover = torch.empty(0, dtype=memory.dtype, device=memory.device)
    cover.set_(storage, memory.storage_offset(), memory.shape, memory.stride())
    set_message(storage._cdata, message)
    return cover


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Set ``tensor.data`` without a class look-up, in one C call that no signal handler interrupts; takes 0.2 us."""
    torch._C._disabled_torch_function_impl(_SET_DATA, (), (tensor, data), {})


def use_count(tensor: torch.Tensor) -> int:
    """Number of C++ references to a tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return _USE_COUNT(tensor)
