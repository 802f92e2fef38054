"""DDP's buckets: which gradients arrive in which of them, whether that has settled, and smaller ones for early arrival.

DDP rebuilds its buckets once, in the second or third forward, in the order in which gradients have arrived. A plan is
made when two backward passes in a row have shown the same buckets, and made anew if the buckets change later. At attach
DDP gets smaller buckets, so that gradients reach the hook early, and at detach its own again. A parameter whose memory
format changes is refused: buckets do not follow it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover import device as gpu
from ddp_crossover.log import short
from ddp_crossover.moments import ForwardWatch
from ddp_crossover.pending.lazy_param import LazyParam
from ddp_crossover.torch_internals.ddp import (
    bucket_cap_bytes,
    gradient_accumulators,
    may_await_backward,
    rebuild_buckets,
    rebuild_under_hook,
)

_BACKWARDS_UNTIL_REBUILT = 3
_Layout = dict[int, tuple[int, ...]]  # bucket index -> parameters, in bucket order


def may_skip_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether DDP calls no hook for buckets whose parameters no rank has used."""
    return bool(getattr(ddp, "skip_all_reduce_unused_params", False))


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
            RuntimeError: if a parameter is unknown, because it belongs to another model.
        """
        self._arrived += len(parameters)
        indices = tuple([self._index_of.get(id(parameter), -1) for parameter in parameters])
        if -1 in indices:
            raise RuntimeError(
                "DDP reduces a parameter that this DearState does not know, so the state was made for another model, "
                "or other code has given DDP a new reducer: each model needs a state of its own, made after that"
            )
        self._now[bucket] = indices

    def have_arrived(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the gradient of any of these has arrived in this backward."""
        arrived = {index for bucket in self._now.values() for index in bucket}
        return any(self._index_of.get(id(parameter)) in arrived for parameter in parameters)

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


class MemoryFormats:
    """The strides of all parameters at attach.

    Args:
        lazies: the parameters that DDP manages.
    """

    def __init__(self, lazies: Sequence[LazyParam]) -> None:
        self._names = [lazy.name for lazy in lazies]
        self._parameters = [lazy.parameter for lazy in lazies]
        self._strides = self._strides_now()

    def refuse_changes(self) -> None:
        """Raise RuntimeError if the memory format of a parameter has changed since attach.

        DDP's buckets keep the old one, so even plain DDP gets most of such gradients wrong.
        """
        if (strides := self._strides_now()) == self._strides:
            return
        for name, parameter, before, now in zip(self._names, self._parameters, self._strides, strides, strict=True):
            if any(size > 1 and a != b for size, a, b in zip(parameter.shape, before, now, strict=True)):
                raise RuntimeError(
                    f"the memory layout of {name} has changed since attach (memory_format=torch.channels_last and the "
                    "like), and DDP's buckets have not: change it before building DistributedDataParallel, or call "
                    "state.detach(), build a new DistributedDataParallel around ddp.module, and attach to that"
                )
        self._strides = strides

    def drop_references(self) -> None:
        self._parameters.clear()

    def _strides_now(self) -> list[tuple[int, ...]]:
        with torch._C.DisableTorchFunctionSubclass():  # strides need no value, so do not touch the parameters
            return list(map(Tensor.stride, self._parameters))


# Size of DDP's buckets: small enough that gradients reach the hook early, and not too many of them, because each hook
# call costs tens of microseconds.
_ARRIVAL_BYTES = 2**20
_MAX_BUCKETS = 256
# On a GPU that time is the host's, which launches backward, and backward is shorter: fewer and larger ones.
_BUCKETS_ON_GPU = 16
_MOST_BYTES_ON_GPU = 8 * 2**20


class Buckets:
    """The buckets in which DDP hands over gradients.

    A gradient reaches the hook only when its whole bucket is complete. The planner decides which gradients travel
    together, so DDP's buckets of 25 MiB would only cost overlap.

    Args:
        ddp: the model.
        parameters: the parameters that it manages.

    Attributes:
        are_as_built: whether they are those that the user has set.
        were_changed: whether they have been changed since the first forward.
        cap_bytes_when_left: maximum size that DDP has once the hook is gone; None for the size that the user has set.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[Parameter]) -> None:
        self._ddp = weakref.ref(ddp)
        self._parameters = list(parameters)
        self._accumulators = gradient_accumulators(parameters)
        total_bytes = sum(parameter.nbytes for parameter in parameters)
        cap_bytes = _small_bytes(total_bytes, on_gpu=gpu.has_streams(parameters[0].device))
        self._small_bytes = cap_bytes if cap_bytes < bucket_cap_bytes(ddp) else None
        self.are_as_built = True
        self.were_changed = False
        self.cap_bytes_when_left: int | None = None
        self._allow_backward: Callable[[], None] | None = None

    def make_small_at_attach(self, parameters: Sequence[Tensor]) -> None:
        """Make them small before there is a hook. Until the next forward, backward is refused."""
        self.are_as_built = False
        ddp = self._ddp()
        if self._small_bytes is None or ddp is None:
            return
        rebuild_buckets(ddp, self._small_bytes)
        if may_await_backward(ddp):
            self._allow_backward = _refuse_backward_of_earlier_forward(parameters)

    def forward_begins(self) -> None:
        """Allow backward from now on, as this forward has one that reduces."""
        # DDP's own hooks do not run under `ddp.forward(x)`, nor in a forward that registered them, as `auto()` does.
        if self._allow_backward is not None:
            self._allow_backward()
            self._allow_backward = None

    def leave(self, ddp: DistributedDataParallel) -> None:
        """Have the next forward allow backward, after the hook is gone, if there was none since attach."""
        allow, self._allow_backward = self._allow_backward, None
        if allow is None:
            return

        def begins() -> None:
            if torch.is_grad_enabled():
                watch.remove()
                allow()

        watch = ForwardWatch(ddp, begins, lambda *_: None)

    def drop_references(self) -> None:
        self._parameters.clear()
        self._accumulators.clear()

    @property
    def may_be_rebuilt(self) -> bool:
        """Whether a new reducer would reduce the same gradients as the one that DDP has."""
        return gradient_accumulators(self._parameters) == self._accumulators

    def stay_small(self) -> None:
        """Leave them small to DDP, which is as fast with them as with anything of ours."""
        self.cap_bytes_when_left = self._small_bytes

    @property
    def when_left(self) -> str:
        """How DDP trains once the hook is gone, in words."""
        if self.cap_bytes_when_left is None:
            return "as it was before attach"
        return f"by itself, in buckets of {short(self.cap_bytes_when_left / 2**20)} MiB"

    def change(self, *, as_built: bool) -> bool:
        """Change them at the beginning of a forward, if they are others; every rank must call it.

        Returns:
            Whether they were changed.
        """
        if as_built == self.are_as_built:
            return False
        self.are_as_built, self.were_changed = as_built, True
        ddp = self._ddp()
        if self._small_bytes is not None and ddp is not None and self.may_be_rebuilt:
            rebuild_under_hook(ddp, None if as_built else self._small_bytes)
        return True


def _small_bytes(total_bytes: int, *, on_gpu: bool) -> int:
    least_bytes = max(_ARRIVAL_BYTES, total_bytes // _MAX_BUCKETS)
    return max(least_bytes, min(total_bytes // _BUCKETS_ON_GPU, _MOST_BYTES_ON_GPU)) if on_gpu else least_bytes


def _refuse_backward_of_earlier_forward(parameters: Sequence[Tensor]) -> Callable[[], None]:
    """Refuse the backward of an earlier forward, because DDP's new reducer would not reduce its gradients.

    Returns:
        A callback that allows backward again.
    """

    def refuse(gradients: object) -> NoReturn:
        raise RuntimeError(
            "dear_hook was attached between a forward and its backward, whose gradients DDP would not reduce: "
            "attach before the forward. If this is the backward of a forward past DDP (of ddp.module), make one "
            "through DDP first"
        )

    def allow() -> None:
        for handle in handles:
            handle.remove()

    # Not hooks on the parameters: `torch.autograd.grad()` runs these, too, and it adds nothing to gradients.
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    handles = [get_gradient_edge(parameter).node.register_prehook(refuse) for parameter in trained]
    return allow
