"""``attach()``: one call for a model, with the state that its options ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, overload

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.comm_hook import DearState, dear_hook
from ddp_crossover.hook.unwrapping import unwrapped_model
from ddp_crossover.options import GivenOptions, switched_off

if TYPE_CHECKING:
    from ddp_crossover.addons.lease.client import GpuLease

State = TypeVar("State", covariant=True)


class StateArguments(GivenOptions, total=False):
    """The keyword arguments of a :class:`DearState`."""

    process_group: dist.ProcessGroup | None
    lease: GpuLease | None


class SyncPolicy(Protocol[State]):
    """What ``attach(sync=...)`` takes: another way to train than exactly, such as ``relaxed.LocalSGD``."""

    def attach(self, ddp: DistributedDataParallel, optimizer: Optimizer | Sequence[Optimizer], **options: Any) -> State:
        """Attach to a model, and return a state of its own kind."""


@overload
def attach(
    ddp: DistributedDataParallel, optimizer: Optimizer | Sequence[Optimizer], *, sync: SyncPolicy[State], **options: Any
) -> State: ...


@overload
def attach(
    ddp: DistributedDataParallel, optimizer: Optimizer | Sequence[Optimizer], **options: Unpack[StateArguments]
) -> DearState: ...


def attach(
    ddp: DistributedDataParallel,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    sync: SyncPolicy[Any] | None = None,
    **options: Any,
) -> Any:
    """Build a :class:`DearState` and register :func:`dear_hook`; ``options`` are keyword arguments of the state.

    With ``DDP_CROSSOVER=off`` in the environment the state is detached, and ``ddp`` trains as without us.

    Args:
        ddp: the model.
        optimizer: its optimizer, or a list of all of them.
        sync: a policy such as :class:`ddp_crossover.relaxed.LocalSGD`, which changes the algorithm and returns a state
            of another kind. Default: train exactly as DDP does.
        options: ``process_group`` and ``lease`` of :class:`DearState`, and any of :class:`Options`.
    """
    if isinstance(sync, type):
        raise TypeError(f"sync= takes a policy, not its class: attach(..., sync={sync.__name__}(...))")
    if sync is not None and not callable(getattr(sync, "attach", None)):
        raise TypeError(
            f"sync= takes a policy such as ddp_crossover.relaxed.LocalSGD(every=8), got {sync!r}: leave it out to "
            "train exactly as DDP does"
        )
    if sync is not None:
        return sync.attach(ddp, optimizer, **options)
    state = DearState(ddp, optimizer, **options)
    if switched_off():
        state.detach()
    else:
        unwrapped_model(ddp).register_comm_hook(state, dear_hook)
    return state
