"""Everything that reads parameters without a forward waits for pending updates first.

``state_dict``, ``load_state_dict``, ``parameters()`` and copies of an attached model give what plain DDP would give.
What cannot be made right (a copy of the DDP object itself, pickling an attached module) says how to get there.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddp_crossover.hooks import PICKLE_ADVICE, Hook

DEEPCOPY_ADVICE = (
    "copy.deepcopy(ddp) would silently drop the communication hook: copy ddp.module instead, or call "
    "state.detach() first"
)
JOIN_ADVICE = (
    "DistributedDataParallel.join() shadows only plain all-reduces and would hang with dear_hook: give every "
    "rank the same number of batches (DistributedSampler(drop_last=True)), or train without the hook"
)


class _Flush(Hook):
    """A hook that flushes."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._flush()


# Methods of a module that hand out or change parameters. `_apply` is behind `to`, `half` and their like.
_READERS = ("parameters", "named_parameters", "get_parameter", "apply", "_apply")


class FlushPoints:
    """Hooks and instance methods on an attached model.

    Args:
        ddp: the model.
        flush: applies all pending updates.
        flush_for_reader: the same, when ``parameters()`` is the reason; told apart because it costs overlap.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        flush: Callable[[], None],
        flush_for_reader: Callable[[], None],
    ) -> None:
        self._ddp = weakref.ref(ddp)  # nothing that DDP's reducer holds may hold DDP
        self._flush = flush
        self._flush_for_reader = flush_for_reader
        self._handles: list[RemovableHandle] = []
        self._suspended = False
        self.install()

    @property
    def _model(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None  # one of its methods is running
        return ddp

    def install(self) -> None:
        """Hang everything up."""
        ddp = self._model
        for module in ddp.modules():
            self._handles += [
                module.register_state_dict_pre_hook(_Flush(self._flush)),
                module.register_load_state_dict_pre_hook(_Flush(self._flush)),
            ]
        for module in ddp.modules():
            for name in _READERS:
                _set(module, name, _FlushFirst(module, name, self))
            _set(module, "zero_grad", _WithoutFlush(module, "zero_grad", self))
        for module in ddp.module.modules():
            _set(module, "__deepcopy__", _CleanCopy(module, self))
        _set(ddp, "__deepcopy__", _Refuse(DEEPCOPY_ADVICE))
        _set(ddp, "__reduce_ex__", _Refuse(PICKLE_ADVICE))
        _set(ddp, "join", _Refuse(JOIN_ADVICE))
        _set(ddp, "join_hook", _Refuse(JOIN_ADVICE))

    def remove(self) -> None:
        """Take everything down."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        ddp = self._ddp()
        for module in ddp.modules() if ddp is not None else ():
            for name in [n for n, value in vars(module).items() if isinstance(value, _Method)]:
                del module.__dict__[name]

    def read_parameters(self) -> None:
        """Somebody is about to look at parameters."""
        if not self._suspended:
            self._flush_for_reader()

    def without_flush(self, call: Callable[[], Any]) -> Any:
        """Run something that lists parameters but looks at gradients only."""
        self._suspended = True
        try:
            return call()
        finally:
            self._suspended = False

    def clean_copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """Copy a module as plain DDP would have it at this point, with nothing of ours in the copy."""
        self._flush()
        self.remove()
        try:
            return copy.deepcopy(module, memo)
        finally:
            self.install()


class _Method(Hook):
    """A method of one module object, in place of that of its class."""


class _FlushFirst(_Method):
    def __init__(self, module: nn.Module, name: str, points: FlushPoints) -> None:
        self._original = getattr(module, name)
        self._points = points
        # Dynamo (torch 2.15, wrap_module) asks every module's `named_parameters` for this.
        self.__func__ = getattr(type(module), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self._points.read_parameters()
        result: Iterator[Any] = self._original(*args, **kwargs)
        return result


class _WithoutFlush(_Method):
    def __init__(self, module: nn.Module, name: str, points: FlushPoints) -> None:
        self._original = getattr(module, name)
        self._points = points

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._points.without_flush(lambda: self._original(*args, **kwargs))


class _CleanCopy(_Method):
    def __init__(self, module: nn.Module, points: FlushPoints) -> None:
        self._module = module
        self._points = points

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        return self._points.clean_copy(self._module, memo)


class _Refuse(_Method):
    def __init__(self, advice: str) -> None:
        self._advice = advice

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(self._advice)


def _set(module: nn.Module, name: str, method: _Method) -> None:
    # Past nn.Module.__setattr__, and past that of torch.compile's wrapper, which would set it on
    # the module inside.
    module.__dict__[name] = method
