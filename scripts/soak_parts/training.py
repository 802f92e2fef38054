"""The training of a soak on one rank: the same with the package and without, step for step."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from soak_parts.settings import SoakSettings

LAYERS = 8
WIDTH = 64
BATCH = 16
CLASSES = 10
BATCHES = 64
SEED = 0


class Training:
    """A small network, its optimizer and its data.

    Batches are made once and come round again. Dropout draws from torch's own generator, which nothing but training
    may move on: if the package did, the two runs would differ.
    """

    def __init__(self, settings: SoakSettings) -> None:
        self._settings = settings
        rank = dist.get_rank()
        torch.manual_seed(SEED)
        self.ddp = DistributedDataParallel(_network(), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
        torch.manual_seed(SEED + 1 + rank)
        self._inputs = torch.randn(BATCHES, BATCH, WIDTH)
        self._labels = torch.randint(CLASSES, (BATCHES, BATCH))

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self._loss(number).backward()
        self.optimizer.step()

    def evaluate(self) -> float:
        """The loss of one batch, in evaluation mode."""
        self.ddp.eval()
        with torch.no_grad():
            loss = self._loss(0).item()
        self.ddp.train()
        return loss

    def state(self) -> dict[str, Any]:
        """Parameters, buffers and optimizer state."""
        return {"model": self.ddp.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self) -> None:
        """Write a checkpoint, on rank 0; the others wait for it. Collective."""
        if dist.get_rank() == 0:
            torch.save(self.state(), self._settings.checkpoint)
        dist.barrier()

    def load(self) -> None:
        """Go back to the last checkpoint. Collective: rank 0 may replace the file when all have read it."""
        content = torch.load(self._settings.checkpoint, weights_only=True)
        self.ddp.module.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        dist.barrier()

    def _loss(self, number: int) -> Tensor:
        batch = number % BATCHES
        return nn.functional.cross_entropy(self.ddp(self._inputs[batch]), self._labels[batch])


def _network() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
