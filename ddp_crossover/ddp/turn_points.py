"""Hooks that begin and end turns: the lease is held by a model's forward and by its optimizers' steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.ddp.forwards import call_before_module
from ddp_crossover.gpu_sharing.turns import Turns
from ddp_crossover.optim.deferred_updates import DeferredUpdates
from ddp_crossover.torch_internals.autograd import call_after_backward
from ddp_crossover.torch_internals.dispatch import tensors_in
from ddp_crossover.torch_internals.optimizers import has_hooks


class TurnPoints:
    """Installs the hooks.

    A turn begins with the forward of the module *inside* of DDP, after DDP's broadcast of buffers. If updates are
    pending, it begins only when the gradients of the first update have arrived. It ends with the backward, with a step
    that computes, or with the forward if no backward will follow.

    Args:
        ddp: the model.
        optimizers: its optimizers.
        turns: begins and ends the turns.
        updates: knows whether updates are pending, and whether ``step()`` is going to defer them.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        turns: Turns,
        updates: DeferredUpdates,
    ) -> None:
        self._turns = turns
        self._updates = updates
        self._inside = False
        self._undo: list[Callable[[], None]] = [
            # Prepended, because the user's pre-hooks may touch parameters, and applying updates needs the turn.
            ddp.register_forward_pre_hook(torch.compiler.disable(self._before_forward), prepend=True).remove,
            ddp.register_forward_hook(torch.compiler.disable(self._after_forward), always_call=True).remove,
            call_before_module(ddp.module, self._before_compute),
        ]
        for optimizer in filter(has_hooks, optimizers):
            self._undo.append(optimizer.register_step_pre_hook(self._before_step).remove)
            self._undo.append(optimizer.register_step_post_hook(self._after_step).remove)

    def remove(self) -> None:
        for undo in self._undo:
            undo()

    def _before_forward(self, ddp: nn.Module, args: Any) -> None:
        assert isinstance(ddp, DistributedDataParallel)
        self._inside = True
        if ddp.will_sync_module_buffers():
            self._turns.release()  # DDP broadcasts buffers next
        else:
            self._turns.want()

    def _before_compute(self) -> None:
        if self._inside:  # if the inner module is called directly, no hook would end the turn
            self._turns.want()
            if not self._updates.pending:
                self._turns.resume()

    def _after_forward(self, ddp: nn.Module, args: Any, output: Any) -> None:
        assert isinstance(ddp, DistributedDataParallel)
        self._inside = False
        # The forward raised, or no backward will follow.
        if output is None or not torch.is_grad_enabled() or not ddp.module.training:
            self._turns.release()
        elif not ddp.require_backward_grad_sync:
            # End the turn with this backward, since the next batch may be loaded then: without synchronization, DDP
            # does not call the communication hook, which ends it otherwise.
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:  # a hook on a leaf, such as a parameter, would stay there
                    tensor.register_hook(self._in_backward_without_sync)

    def _in_backward_without_sync(self, gradient: Tensor) -> None:
        call_after_backward(self._turns.release)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._updates.is_deferred(optimizer):
            self._turns.want()
            self._turns.resume()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
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
