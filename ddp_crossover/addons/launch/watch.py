"""Notices every DDP model, and calls back before its first training forward.

Imports no torch at the top: it is loaded while torch itself is being imported.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

# Called before a training forward; returns whether it is to be called before the next one again.
BeforeForward = Callable[["DistributedDataParallel"], bool]


def watch_new_models(ddp_class: type[DistributedDataParallel], before_forward: Callable[[], BeforeForward]) -> None:
    """Watch every model that is built from now on; ``before_forward()`` is called when there is one."""
    build: Any = ddp_class.__init__

    @functools.wraps(build)
    def build_and_watch(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        build(ddp, *args, **kwargs)
        watch_model(ddp, before_forward())

    setattr(ddp_class, "__init__", build_and_watch)  # noqa: B010  # mypy takes an assignment for a mistake


def watch_model(ddp: DistributedDataParallel, before_forward: BeforeForward) -> None:
    """Call ``before_forward(ddp)`` before the next training forward of ``ddp``, and again as long as it returns True.

    Leaves the model alone, for good, if other code has replaced its ``forward`` by then.
    """
    import torch

    from ddp_crossover.torch_internals.ddp import has_comm_hook, is_in_training_mode

    left_alone: WeakSet[DistributedDataParallel] = WeakSet()

    def is_watched(ddp: DistributedDataParallel) -> bool:
        return getattr(vars(ddp).get("forward"), "__func__", None) is forward

    def is_trained(ddp: DistributedDataParallel) -> bool:
        # To evaluate, some scripts freeze all parameters, and do nothing else.
        is_training = is_in_training_mode(ddp) and torch.is_grad_enabled()
        return is_training and any(one.requires_grad for one in ddp.module.parameters())

    def prepare(ddp: DistributedDataParallel) -> bool:
        if ddp in left_alone or not is_trained(ddp):
            return False
        if not is_watched(ddp):  # what is there now has called us, and may be taken away again, as by detach()
            left_alone.add(ddp)
            if has_comm_hook(ddp):
                before_forward(ddp)  # the script has attached by itself
            else:
                _say_left_alone(ddp)
            return False
        watching = vars(ddp).pop("forward")
        if before_forward(ddp):
            vars(ddp)["forward"] = watching
            return False
        return "forward" in vars(ddp)

    has_new_forward = torch.compiler.disable(prepare)

    def forward(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if has_new_forward(ddp):
            return ddp.forward(*args, **kwargs)
        return type(ddp).forward(ddp, *args, **kwargs)

    # A bound method, because copy and pickle know how to bind one to a copy of the model. Set where nn.Module's own
    # __setattr__ does not look.
    vars(ddp).setdefault("forward", types.MethodType(forward, ddp))


def _say_left_alone(ddp: DistributedDataParallel) -> None:
    # Here, because torch may have been imported only now.
    import torch.distributed as dist

    from ddp_crossover.log import say
    from ddp_crossover.options import switched_off

    if not switched_off() and dist.get_rank(ddp.process_group) == 0:
        say(
            f"{type(ddp.module).__name__} trains as plain DDP: other code has replaced its forward before the first "
            "training forward. Call ddp_crossover.attach(ddp, optimizer) after that",
            logging.WARNING,
        )
