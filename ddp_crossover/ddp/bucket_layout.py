"""Which gradients come in which DDP bucket, and whether that has settled.

DDP rebuilds its buckets once, in the second or third forward, in the order in which gradients have arrived. A plan is
worth making when two backward passes in a row have shown the same buckets; if they ever change again, it is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

_Layout = dict[int, tuple[int, ...]]  # bucket index -> parameters, in bucket order


class LayoutRecorder:
    """Watches the buckets of every backward pass.

    Args:
        parameters: the parameters, numbered as in the plan.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._now: _Layout = {}
        self._arrived = 0
        self._last: _Layout = {}
        self._before_last: _Layout = {}
        self._planned: _Layout = {}

    def begin_backward(self) -> None:
        """Forget what an unfinished backward has left."""
        self._now = {}
        self._arrived = 0

    def record(self, bucket: int, parameters: Sequence[Tensor]) -> None:
        """Note one bucket, by its index, and what it holds."""
        self._arrived += len(parameters)
        indices = tuple([self._index_of.get(id(parameter), -1) for parameter in parameters])
        if -1 in indices:
            raise RuntimeError(
                "DDP reduces a parameter that this DearState does not know. Either it did not require a gradient when "
                "dear_hook was attached: freeze and unfreeze parameters before building DistributedDataParallel, then "
                "attach. Or the state was made for another model: each model needs its own"
            )
        self._now[bucket] = indices

    @property
    def complete(self) -> bool:
        """Whether every gradient of this backward has arrived."""
        return self._arrived == len(self._index_of)

    def missing(self) -> list[int]:
        """Parameters whose gradients have not arrived in this backward."""
        arrived = {parameter for bucket in self._now.values() for parameter in bucket}
        return [index for index in self._index_of.values() if index not in arrived]

    def end_backward(self) -> None:
        """The backward pass has finished."""
        if self.complete:
            self._before_last, self._last = self._last, self._now

    def settled_anew(self) -> bool:
        """Whether the last two backward passes agree with each other and not with the plan."""
        return bool(self._last) and self._last == self._before_last and self._last != self._planned

    def adopt(self) -> None:
        """The plan in force was made from this layout."""
        self._planned = self._last

    def arrival_order(self) -> list[int]:
        """Parameters in the order in which their gradients arrive."""
        return [parameter for index in sorted(self._last) for parameter in self._last[index]]
