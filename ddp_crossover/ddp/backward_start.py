"""Notices when the backward of a forward begins, before it reaches any parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_iter


def call_before_backward(output: Any, callback: Callable[[], None]) -> bool:
    """Call ``callback`` whenever a backward comes to a tensor in a forward's output.

    A backward may come to the model in another way, through a tensor that the script has found elsewhere.

    Returns:
        Whether there is such a tensor.
    """

    def call(gradients: tuple[Tensor, ...]) -> None:
        callback()

    nodes = set(_nodes(output))
    for node in nodes:
        node.register_prehook(call)
    return bool(nodes)


def _nodes(output: Any) -> Iterator[Node]:
    for leaf in tree_iter(output):
        if isinstance(leaf, Tensor):
            # An operator that works in place on a view gives it another node, but not what it is a view of.
            for tensor in (leaf, leaf._base if leaf._is_view() else None):
                if tensor is not None and tensor.grad_fn is not None:
                    yield tensor.grad_fn
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _nodes([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
