"""Notices when the backward of a forward begins, before it reaches any parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle


def call_before_backward(output: Any, callback: Callable[[], None]) -> bool:
    """Call ``callback`` once, when a backward first comes to a tensor in a forward's output.

    A backward may come to the model in another way, through a tensor that the script has found elsewhere.

    Returns:
        Whether there is such a tensor.
    """
    handles: list[RemovableHandle] = []

    def once(gradients: tuple[Tensor, ...]) -> None:
        if handles:
            for handle in handles:
                handle.remove()
            handles.clear()
            callback()

    handles += [node.register_prehook(once) for node in set(_nodes(output))]
    return bool(handles)


def _nodes(output: Any) -> Iterator[Node]:
    for leaf in tree_iter(output):
        if isinstance(leaf, Tensor):
            if leaf.grad_fn is not None:
                yield leaf.grad_fn
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _nodes([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
