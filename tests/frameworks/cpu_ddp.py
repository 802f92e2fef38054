"""DDP that leaves `device_ids` out: several trainers name a GPU in any case, which DDP refuses for models on CPUs.

Import this before the framework.
"""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook


class CpuDistributedDataParallel(DistributedDataParallel):
    """DDP of a model on CPUs, whatever devices its caller names."""

    def __init__(self, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any):
        super().__init__(module, **options)
        _models.append(module)


torch.nn.parallel.DistributedDataParallel = CpuDistributedDataParallel
torch.nn.parallel.distributed.DistributedDataParallel = CpuDistributedDataParallel


class Kept:
    """Keeps what a trainer builds and does not hand out: the last model in DDP, and all optimizers that step."""

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        register_optimizer_step_post_hook(self._keep)

    @property
    def model(self) -> torch.nn.Module:
        return _models[-1]

    def _keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not any(optimizer is one for one in self.optimizers):
            self.optimizers.append(optimizer)


_models: list[torch.nn.Module] = []
