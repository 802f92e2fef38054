"""For Hugging Face's ``Trainer``: a callback."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.attaching import attach
from ddp_crossover.hook.unwrapping import live_objects
from ddp_crossover.integrations.batches import Batches

TrainerCallback: Any = import_module("transformers").TrainerCallback

logger = logging.getLogger("ddp_crossover")


class DearCallback(Batches, TrainerCallback):  # type: ignore[misc]  # frameworks are not installed where types are checked
    """Overlaps the communication of a ``Trainer`` that uses DDP.

    Attaches when training starts and detaches when it ends, in every ``train()``. Without DDP it does nothing but say
    so.

    Args:
        options: keyword arguments of :class:`ddp_crossover.DearState`.

    Attributes:
        state: the state of the last ``train()``, for its figures; None before the first, and without DDP.

    Example::

        Trainer(model, args, train_dataset=data, callbacks=[DearCallback()])
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Optimizer, **kwargs: Any
    ) -> None:
        """Attach: DDP, the optimizer and what a checkpoint holds are in place."""
        self._detach()  # from a training that raised: the Trainer begins anew if it finds a batch size by itself
        self.state = None
        ddp = _ddp_around(model)
        if ddp is not None:
            self.state = attach(ddp, optimizer, **self._options)
        elif args.process_index == 0:
            logger.warning(
                "DearCallback does nothing, because the Trainer uses no DistributedDataParallel here: start it with "
                "torchrun or accelerate launch, with several processes"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach: the next ``train()`` may wrap the model anew."""
        self._detach()


def _ddp_around(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP object around a model: a callback gets the model only, and nothing that leads to the Trainer.

    Raises:
        ValueError: if there are several.
    """
    found = [ddp for ddp in live_objects(DistributedDataParallel) if any(module is model for module in ddp.modules())]
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} DistributedDataParallel objects hold this {type(model).__name__}, and there is no telling "
            "which one the Trainer uses: drop the others, or call attach(trainer.model_wrapped, trainer.optimizer) in "
            "a callback of your own"
        )
    return found[0] if found else None
