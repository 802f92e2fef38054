"""The invariant of every backward on every rank of the tests: hooks are given what DDP was built to reduce.

What that is, is noted where DDP is built, and not asked of the package. Freezing, thawing, attach, new buckets and
detach must not change it.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.hook.buckets import may_skip_buckets
from ddp_crossover.hook.reducer import Reducer
from ddp_crossover.torch_internals.ddp import GradBucket

_Parameters = list["weakref.ref[Tensor]"]
_as_built: weakref.WeakKeyDictionary[DistributedDataParallel, _Parameters] = weakref.WeakKeyDictionary()


def watch_every_backward() -> None:
    """Check it in this process from now on."""
    build, begin = DistributedDataParallel.__init__, Reducer._begin_backward
    reduce, end = Reducer.reduce, Reducer._backward_ended

    @functools.wraps(build)
    def building(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        trained = (p for name, p in self.module.named_parameters() if p.requires_grad)
        ignored = {id(p) for name, p in self.module.named_parameters() if name in self.parameters_to_ignore}
        _as_built[self] = [weakref.ref(p) for p in trained if id(p) not in ignored]

    @functools.wraps(reduce)
    def reducing(self: Reducer, bucket: GradBucket) -> Any:
        future = reduce(self, bucket)
        self.arrived |= set(map(id, bucket.parameters()))  # type: ignore[attr-defined]
        return future

    @functools.wraps(begin)
    def beginning(self: Reducer) -> None:
        self.arrived = set()  # type: ignore[attr-defined]
        begin(self)

    @functools.wraps(end)
    def ending(self: Reducer) -> None:
        iterations = self._iterations.count
        end(self)
        if self._iterations.count > iterations and self.model in _as_built and not may_skip_buckets(self.model):
            _require_all(self.model, self.arrived)  # type: ignore[attr-defined]

    DistributedDataParallel.__init__ = building  # type: ignore[method-assign]
    Reducer.reduce = reducing  # type: ignore[method-assign]
    Reducer._begin_backward = beginning  # type: ignore[method-assign]
    Reducer._backward_ended = ending  # type: ignore[method-assign]


def _require_all(ddp: DistributedDataParallel, arrived: set[int]) -> None:
    lost = [p for ref in _as_built[ddp] if (p := ref()) is not None and id(p) not in arrived]
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    if lost:
        raise AssertionError(f"DDP was built to reduce {[names.get(id(p), '?') for p in lost]}, and no bucket had them")
