"""Which module first uses each parameter, and the hooks that wait there.

A parameter is not always used by the module that owns it: ``MultiheadAttention`` reads ``out_proj.weight`` without
calling ``out_proj``, and users write ``F.linear(x, self.a.weight)``. So the first forward runs under a dispatch mode
that sees every operator and knows the stack of modules that are being called. From then on a forward pre-hook on each
user, and on each owner in case it is called in another way some day, waits for the groups of its parameters.

Code made by dynamo does not run hooks of the modules inside it. The second forward shows which modules' hooks
do run; parameters used elsewhere are waited for at the nearest caller whose hook does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from ddp_crossover.hooks import Hook
from ddp_crossover.torch_internals import is_compiled


class FirstUseAudit:
    """Learns, from two forwards, where each parameter is used first.

    Args:
        root: the module whose forward is audited. Its own pre-hook is the caller's business.
        parameters: the parameters to look for.
    """

    def __init__(self, root: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        self._root = root
        self._sought = {id(p): index for index, p in enumerate(parameters)}
        self._paths: dict[int, list[tuple[nn.Module, ...]]] = {}
        self._use_rank: dict[int, int] = {}
        self._stack: list[nn.Module] = []
        self._called: set[nn.Module] = set()
        self._hooks_run: set[nn.Module] = set()
        self._forwards = 0
        self._mode: _ReadMode | None = None
        self._handles: list[RemovableHandle] = []

    @property
    def done(self) -> bool:
        """Whether both forwards have been seen."""
        return self._forwards >= 2 and self._mode is None and not self._handles

    def begin_forward(self) -> None:
        """Call before the audited forward; ends what an earlier forward that raised has left."""
        self.end_forward(completed=False)
        if self.done:
            return
        self._stack = [self._root]
        for module in self._root.modules():
            self._handles += [
                module.register_forward_pre_hook(_Entered(self), prepend=True),
                module.register_forward_hook(_Left(self), always_call=True),
            ]
        if self._forwards == 0:
            self._mode = _ReadMode(self._note_read)
            self._mode.__enter__()

    def end_forward(self, *, completed: bool = True) -> None:
        """Call after the audited forward."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        for handle in self._handles:
            handle.remove()
        if self._handles and completed:
            self._forwards += 1
        self._handles = []

    def use_rank(self, index: int) -> int:
        """When a parameter is first used; those never seen count as used at once, by the root."""
        return self._use_rank.get(index, -1)

    def waiters(self, index: int) -> set[nn.Module]:
        """Modules before whose forward the parameter must be up to date; the root where none is known."""
        paths = self._paths.get(index)
        if paths is None:
            return {self._root}
        return {self._nearest_with_hooks(path) for path in paths}

    def runs_hooks(self, module: nn.Module) -> bool:
        """False if the module was called and its hooks did not run, as inside compiled code."""
        return module in self._hooks_run or module not in self._called

    def entered(self, module: nn.Module) -> None:
        self._stack.append(module)
        # Under a dispatch mode dynamo stands aside, so only the second forward tells.
        (self._hooks_run if self._mode is None else self._called).add(module)

    def left(self, module: nn.Module) -> None:
        while len(self._stack) > 1 and self._stack.pop() is not module:
            pass

    def _note_read(self, tensor: Tensor) -> None:
        index = self._sought.get(id(tensor))
        if index is None:
            return
        self._use_rank.setdefault(index, len(self._use_rank))
        path = tuple(self._stack)
        paths = self._paths.setdefault(index, [])
        if path[-1] not in (known[-1] for known in paths):
            paths.append(path)

    def _nearest_with_hooks(self, path: tuple[nn.Module, ...]) -> nn.Module:
        """The innermost caller that is entered before any compiled code is."""
        nearest = self._root
        for module in path:
            if is_compiled(module):
                return module
            if module not in self._hooks_run:
                return nearest
            nearest = module
        return nearest


class _Entered(Hook):
    """Forward pre-hook: the module is being called."""

    def __init__(self, audit: FirstUseAudit) -> None:
        self._audit = audit

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._audit.entered(module)


class _Left(Hook):
    """Forward hook: the module returns, or raises."""

    def __init__(self, audit: FirstUseAudit) -> None:
        self._audit = audit

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._audit.left(module)


class _ReadMode(TorchDispatchMode):
    """Reports every tensor that an operator gets."""

    supports_higher_order_operators = True

    def __init__(self, note_read: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note_read = note_read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        for argument in tree_iter((args, kwargs or {})):
            if isinstance(argument, Tensor):
                self._note_read(argument)
        return func(*args, **(kwargs or {}))


def owners(root: nn.Module, parameters: Iterable[nn.Parameter]) -> list[set[nn.Module]]:
    """For each parameter, the modules that have it as an attribute of their own."""
    index_of = {id(p): index for index, p in enumerate(parameters)}
    found: list[set[nn.Module]] = [set() for _ in index_of]
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            if (index := index_of.get(id(parameter))) is not None:
                found[index].add(module)
    return found
