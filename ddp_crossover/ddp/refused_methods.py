"""Refuses methods of an attached DDP model that would silently differ from plain DDP; errors say what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.hooks import PICKLE_ADVICE, Hook

_DEEPCOPY_ADVICE = (
    "copy.deepcopy(ddp) would silently drop the communication hook: copy ddp.module instead, or call "
    "state.detach() first"
)
JOIN_ADVICE = (
    "DistributedDataParallel.join() shadows only plain all-reduces and would hang with dear_hook: give every "
    "rank the same number of batches (DistributedSampler(drop_last=True)), or train without the hook"
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


def allow_methods(ddp: DistributedDataParallel) -> None:
    """Restore the model's own methods."""
    for name in _ADVICE:
        ddp.__dict__.pop(name, None)
