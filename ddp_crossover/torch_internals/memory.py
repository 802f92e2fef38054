"""Where tensors are, references to their memory, and memory that torch refuses to access."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ddp_crossover.torch_internals.private import private

_USE_COUNT: Callable[[torch.Tensor], int] = private(torch.Tensor, "_use_count")
_STORAGE_USE_COUNT: Callable[[int], int] = private(torch._C, "_storage_Use_Count")


class Memory(NamedTuple):
    """Where a tensor is: the number of its storage, its first byte in it, and the byte after its last one."""

    storage: int
    start: int
    stop: int


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """Where a tensor is. A storage of 0 stands for a tensor without elements; None for one that wraps others."""
    if not tensor.numel():
        return Memory(0, 0, 0)
    try:
        storage = tensor.untyped_storage()
        if not storage.data_ptr():
            return None
    except (RuntimeError, NotImplementedError):  # sparse, or a wrapper
        return None
    start = int(tensor.storage_offset())
    last = start + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return Memory(private(storage, "_cdata"), start * tensor.itemsize, (last + 1) * tensor.itemsize)


def which_overlap(places: Iterable[tuple[Memory | None, int]]) -> set[int]:
    """The numbers of which a place overlaps one of another number; what has no known place overlaps nothing."""
    found: set[int] = set()
    reached, by = Memory(0, 0, 0), -1
    for place, number in sorted((place, number) for place, number in places if place is not None and place.storage):
        if place.storage == reached.storage and place.start < reached.stop and number != by:
            found |= {number, by}
        if place.storage != reached.storage or place.stop > reached.stop:
            reached, by = place, number
    return found


def number_kept(tensor: torch.Tensor) -> object:
    """While this object lives, no other storage gets the number of this tensor's, also after its memory is freed."""
    return StorageWeakRef(tensor.untyped_storage())


def share_storage(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether a tensor of ``some`` is in the storage of one of ``others``, as views of one bucket are."""
    storages = {place.storage for each in others if (place := memory_of(each)) is not None} - {0}
    return any((place := memory_of(each)) is not None and place.storage in storages for each in some)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Number of C++ references to a storage: one for each tensor, plus a constant."""
    return _STORAGE_USE_COUNT(storage._cdata)


def references_to_memory(tensor: torch.Tensor) -> int:
    """Number of references in C++ and Python to a tensor and to its storage, plus a constant."""
    storage = tensor.untyped_storage()
    of_storage = storage_use_count(storage) + sys.getrefcount(storage)
    return of_storage + _USE_COUNT(tensor) + sys.getrefcount(tensor)


class Covers:
    """Makes tensors that look like a parameter's memory, to point the parameter to while its value is not up to date.

    Where torch can, C++ that reads or writes their values gets a RuntimeError. It cannot if it was built for CPUs only:
    then reads find NaN, and writes get torch's error for fake tensors. Checked on torch 2.11 to 2.15.

    Attributes:
        raise_errors: whether torch can.
    """

    def __init__(self) -> None:
        self._set_message = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
        self.raise_errors = self._set_message is not None
        self._nans: dict[torch.device, torch.UntypedStorage] = {}

    def make(self, memory: torch.Tensor, message: str) -> torch.Tensor | None:
        """Return the cover of ``memory``; None for a tensor without elements.

        Args:
            memory: tensor whose dtype, device, shape and strides the result has.
            message: text of the RuntimeError.
        """
        if not memory.numel():
            return None
        cover = torch.empty(0, dtype=memory.dtype, device=memory.device)
        if self._set_message is None:
            cover.set_(self._nan_storage(memory), 0, memory.shape, memory.stride())
            return cover
        own = memory.untyped_storage()
        construct = private(torch._C, "_construct_storage_from_data_pointer")
        storage = construct(own.data_ptr(), memory.device, own.nbytes())  # owns no memory, counts as no reference
        cover.set_(storage, memory.storage_offset(), memory.shape, memory.stride())
        self._set_message(storage._cdata, message)
        return cover

    def _nan_storage(self, memory: torch.Tensor) -> torch.UntypedStorage:
        """Memory of at least this size in which each number of any float type is NaN, the same for all."""
        nbytes = memory.untyped_storage().nbytes()
        found = self._nans.get(memory.device)
        if found is None or found.nbytes() < nbytes:
            # All bits set are NaN in fp64, fp32, fp16 and bf16.
            nans = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=memory.device)
            private(torch._C, "_set_throw_on_mutable_data_ptr")(nans)
            found = self._nans[memory.device] = nans.untyped_storage()
        return found


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Set ``tensor.data`` without a class look-up, in one C call that no signal handler interrupts; takes 0.2 us."""
    torch._C._disabled_torch_function_impl(_SET_DATA, (), (tensor, data), {})


def use_count(tensor: torch.Tensor) -> int:
    """Number of C++ references to a tensor."""
    # One call of C: a signal handler that runs in `with torch._C.DisableTorchFunctionSubclass()` would see old values.
    return int(torch._C._disabled_torch_function_impl(_USE_COUNT, (), (tensor,), {}))
