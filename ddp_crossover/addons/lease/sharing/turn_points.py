"""When turns begin and end: the lease is held by a model's forward, its backward and its optimizers' steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.addons.lease.sharing.turns import Turns
from ddp_crossover.moments import BeforeBackward, Follower
from ddp_crossover.torch_internals.autograd import call_after_backward


class Updates(Protocol):
    """The part of ``DeferredUpdates`` that is used here."""

    @property
    def pending(self) -> bool: ...

    def is_deferred(self, optimizer: Optimizer) -> bool:
        """Whether ``step()`` would defer its updates."""


class TurnPoints(Follower):
    """Takes turns.

    A turn begins with the forward of the module *inside* of DDP, after DDP's broadcast of buffers. If updates are
    pending, it begins only when the gradients of the first update have arrived. It ends with the backward, with a step
    that computes, or with the forward if no backward will follow.

    Args:
        turns: begins and ends the turns.
        updates: knows whether updates are pending, and whether ``step()`` is going to defer them.
    """

    def __init__(self, turns: Turns, updates: Updates) -> None:
        self._turns = turns
        self._updates = updates
        self._inside = False

    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        self._inside = True
        if ddp.will_sync_module_buffers():
            self._turns.release()  # DDP broadcasts buffers next
        else:
            self._turns.want()

    def compute_begins(self) -> None:
        if self._inside:  # if the inner module is called directly, nobody would end the turn
            self._turns.want()
            if not self._updates.pending:
                self._turns.resume()

    def forward_ends(self, ddp: DistributedDataParallel, output: Any, before_backward: BeforeBackward) -> None:
        self._inside = False
        # The forward raised, or no backward will follow.
        if output is None or not torch.is_grad_enabled() or not ddp.module.training:
            self._turns.release()
        elif not ddp.require_backward_grad_sync:
            # End the turn with this backward, since the next batch may be loaded then: without synchronization, DDP
            # does not call the communication hook, which ends it otherwise.
            before_backward(self._backward_without_sync)

    def bucket_arrives(self, parameters: Sequence[Tensor], *, is_first: bool) -> None:
        if is_first:
            self._turns.want()
            self._turns.resume()

    def backward_ends(self) -> None:
        self._turns.release()
        self._turns.step_ended()

    def _backward_without_sync(self) -> None:
        call_after_backward(self._turns.release)

    def step_begins(self, optimizer: Optimizer) -> None:
        if not self._updates.is_deferred(optimizer):
            self._turns.want()
            self._turns.resume()

    def step_ends(self, optimizer: Optimizer) -> None:
        self._turns.release()


def why_turns_stand(ddp: DistributedDataParallel) -> str | None:
    """What lets a turn on a GPU last although the GPU waits for a peer; None if nothing does."""
    if not (ddp.broadcast_buffers and any(True for _ in ddp.module.buffers())):
        return None
    return (
        "DDP broadcasts the model's buffers before each forward, which the lease does not know of: while a peer is "
        "late there, other jobs may wait for this one's turn to end for up to 10 s. If ranks may have buffers of their "
        "own, build DistributedDataParallel with broadcast_buffers=False"
    )
