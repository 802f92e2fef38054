"""Refuses methods of an attached DDP model that would silently differ from plain DDP; errors say what to do instead."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.hooks import PICKLE_ADVICE, Hook
from ddp_crossover.torch_internals.ddp import no_comm_hooks

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
    """Let copies and pickles of the model be plain DDP, for scripts that do not know that it is attached.

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
