"""For Accelerate: ``attach`` for what ``accelerator.prepare`` returns.

``DistributedDataParallelKwargs(comm_hook=...)`` takes names of Accelerate's own list only, and leaves out any other
hook without a word.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_crossover.attaching import attach as attach_to_ddp
from ddp_crossover.comm_hook import DearState
from ddp_crossover.hook.unwrapping import unwrapped_model

logger = logging.getLogger("ddp_crossover")


def attach(accelerator: Any, model: nn.Module, optimizer: Optimizer, **options: Any) -> DearState | None:
    """Attach to a model and an optimizer that ``accelerator.prepare`` has returned.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        model: the prepared model.
        optimizer: its optimizer, prepared or not.
        options: keyword arguments of :class:`ddp_crossover.DearState`.

    Returns:
        The state; None if there is only one process, so that a script runs there as well.

    Raises:
        TypeError, ValueError: for a model that was not prepared, and for a setup that cannot be trained exactly, such
            as FSDP or DeepSpeed; the message says what to do instead.

    Example::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        attach(accelerator, model, optimizer)
    """
    if accelerator.num_processes == 1:
        logger.warning("ddp_crossover has nothing to overlap: Accelerate runs one process only")
        return None
    try:
        ddp = unwrapped_model(model)
    except TypeError as error:
        raise TypeError(
            f"{error}. With Accelerate: pass the model that accelerator.prepare(...) has returned, and use neither "
            "FSDP nor DeepSpeed"
        ) from None
    state: DearState = attach_to_ddp(ddp, optimizer, **options)
    return state
