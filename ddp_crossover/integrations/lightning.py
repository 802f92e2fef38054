"""For Lightning's ``Trainer``: a callback.

Lightning calls ``DDPStrategy(ddp_comm_hook=...)`` on CUDA only, and before there are optimizers, so ``dear_hook`` does
not work there. Fabric needs no callback: ``dx.attach(model, optimizer)`` behind ``fabric.setup(model, optimizer)``.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.attaching import attach
from ddp_crossover.hook.unwrapping import unwrapped_model
from ddp_crossover.integrations.batches import Batches

# One framework under two names. Both may be installed, and a callback must be of the one whose Trainer is used.
_is_the_older_name = ("pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules) or (
    find_spec("lightning") is None
)
Callback: Any = import_module("pytorch_lightning" if _is_the_older_name else "lightning.pytorch").Callback

logger = logging.getLogger("ddp_crossover")


class DearCallback(Batches, Callback):  # type: ignore[misc]  # frameworks are not installed where types are checked
    """Overlaps the communication of ``Trainer(strategy="ddp")``, with automatic and with manual optimization.

    Attaches when training starts and detaches when it ends, in every ``fit``. With a strategy other than DDP it does
    nothing but say so.

    Args:
        options: keyword arguments of :class:`ddp_crossover.DearState`.

    Attributes:
        state: the state of the last ``fit``, for its figures; None before the first, and without DDP.

    Example::

        Trainer(strategy="ddp", callbacks=[DearCallback()])
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: DDP, the optimizers and what a checkpoint holds are in place."""
        self.state = None
        try:
            ddp: DistributedDataParallel = unwrapped_model(trainer.strategy.model)
        except TypeError:
            if trainer.is_global_zero:
                logger.warning(
                    "DearCallback does nothing, because %s uses no DistributedDataParallel: with several processes, "
                    "use Trainer(strategy='ddp')",
                    type(trainer.strategy).__name__,
                )
            return
        self.state = attach(ddp, trainer.strategy.optimizers, **self._options)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach: Lightning takes its module out of DDP next, and the next ``fit`` wraps it anew."""
        self._detach()
