"""What is set around a call of ``step()`` and decides what its operations compute, as autocast does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ddp_crossover.torch_internals.dispatch import default_device

AUTOCAST_DEVICES = ("cpu", "cuda")
_AS_IT_IS: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Surroundings(NamedTuple):
    """What was set at ``step()``.

    Attributes:
        autocast: for each of ``AUTOCAST_DEVICES``, whether it has autocast, and the dtype that autocast casts to, or
            would if the step itself entered it.
        default_dtype: of the tensors that a step makes.
        default_device: where they are.
        records_gradients: whether autograd records what a step does, unless the step has it stop.
    """

    autocast: tuple[tuple[bool, torch.dtype], ...]
    default_dtype: torch.dtype
    default_device: torch.device
    records_gradients: bool

    @classmethod
    def now(cls, *, is_of_torch: bool) -> Surroundings:
        """What is set here; torch's own optimizers have autograd record nothing."""
        return cls(
            tuple((torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in AUTOCAST_DEVICES),
            torch.get_default_dtype(),
            default_device(),
            not is_of_torch and torch.is_grad_enabled(),
        )

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Context in which all is as it was then."""
        here = Surroundings.now(is_of_torch=False)
        return _AS_IT_IS if here == self else self._restored(here)  # each update of a group comes here

    @contextlib.contextmanager
    def _restored(self, here: Surroundings) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if here.default_dtype is not self.default_dtype:  # of all threads, so no oftener than needed
                stack.callback(torch.set_default_dtype, here.default_dtype)
                torch.set_default_dtype(self.default_dtype)
            if here.default_device != self.default_device:  # a mode, which sees each operation
                stack.enter_context(self.default_device)
            for device, then, now in zip(AUTOCAST_DEVICES, self.autocast, here.autocast, strict=True):
                if now != then:
                    is_enabled, dtype = then
                    stack.enter_context(torch.autocast(device, dtype, is_enabled))
            stack.enter_context(torch.set_grad_enabled(self.records_gradients))
            yield
