"""What is set around a call of ``step()`` and decides what its operations compute, as autocast does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")
_AS_IT_IS: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Surroundings(NamedTuple):
    """What was set at ``step()``.

    Attributes:
        autocast: the devices with autocast, and the dtype that it casts to.
        default_dtype: of the tensors that a step makes.
        records_gradients: whether autograd records what a step does, unless the step has it stop.
    """

    autocast: tuple[tuple[str, torch.dtype], ...]
    default_dtype: torch.dtype
    records_gradients: bool

    @classmethod
    def now(cls, *, is_of_torch: bool) -> Surroundings:
        """What is set here; torch's own optimizers have autograd record nothing."""
        autocast = tuple((each, torch.get_autocast_dtype(each)) for each in AUTOCAST_DEVICES if _has_autocast(each))
        return cls(autocast, torch.get_default_dtype(), not is_of_torch and torch.is_grad_enabled())

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Context in which all is as it was then, entered where there is no autocast and autograd records nothing."""
        # Each update of a group comes here.
        is_usual = not self.autocast and not self.records_gradients
        return _AS_IT_IS if is_usual and torch.get_default_dtype() is self.default_dtype else self._restored()

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        default_dtype = torch.get_default_dtype()
        with contextlib.ExitStack() as stack:
            if default_dtype is not self.default_dtype:  # of all threads, so no oftener than needed
                stack.callback(torch.set_default_dtype, default_dtype)
                torch.set_default_dtype(self.default_dtype)
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            stack.enter_context(torch.set_grad_enabled(self.records_gradients))
            yield


def _has_autocast(device: str) -> bool:
    return bool(torch.is_autocast_enabled(device))
