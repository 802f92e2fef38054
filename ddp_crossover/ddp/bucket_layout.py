"""Records which gradients arrive in which DDP bucket, and whether that has settled.

DDP rebuilds its buckets once, in the second or third forward, in the order in which gradients have arrived. A plan is
made when two backward passes in a row have shown the same buckets, and made anew if the buckets change later.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

_BACKWARDS_UNTIL_REBUILT = 3
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
        self._complete_backwards = 0

    def begin_anew(self) -> None:
        """Note that DDP was given new buckets, which it will rebuild as it did the first ones."""
        self._complete_backwards = 0

    @property
    def stays(self) -> bool:
        """Whether DDP has rebuilt its buckets, or will not do so."""
        return self._complete_backwards >= _BACKWARDS_UNTIL_REBUILT

    def begin_backward(self) -> None:
        """Start with an empty record, also after a backward that raised."""
        self._now = {}
        self._arrived = 0

    def record(self, bucket: int, parameters: Sequence[Tensor]) -> None:
        """Note the parameters of one bucket, given its index.

        Raises:
            RuntimeError: if a parameter is unknown, because it was frozen at attach or belongs to another model.
        """
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
        """Return the indices of parameters whose gradients have not arrived in this backward."""
        arrived = {parameter for bucket in self._now.values() for parameter in bucket}
        return [index for index in self._index_of.values() if index not in arrived]

    def end_backward(self) -> None:
        """Keep the layout of this backward, if every gradient has arrived."""
        if self.complete:
            self._complete_backwards += 1
            self._before_last, self._last = self._last, self._now

    def settled_anew(self) -> bool:
        """Whether the last two backward passes had the same layout, and it is not the one of the plan."""
        return bool(self._last) and self._last == self._before_last and self._last != self._planned

    def adopt(self) -> None:
        """Remember that the plan in force was made from the latest layout."""
        self._planned = self._last

    def arrival_order(self) -> list[int]:
        """Return the indices of parameters in the order in which their gradients arrive."""
        return [parameter for index in sorted(self._last) for parameter in self._last[index]]
