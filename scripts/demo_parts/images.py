"""The images of the demo, and the course of batches that each arm takes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train_parts.data import load_digits


class Images:
    """Scikit-learn's hand-written digits (no download), in the same order for every arm.

    Args:
        image_size: pixels to which the 8x8 images are enlarged.
        batch_size: images per rank and step; may be changed before training begins.
    """

    def __init__(self, image_size: int, batch_size: int) -> None:
        train, test, self.classes = load_digits(image_size)
        self._train: tuple[Tensor, Tensor] = train.tensors  # type: ignore[attr-defined]
        self._test: tuple[Tensor, Tensor] = test.tensors  # type: ignore[attr-defined]
        self.batch_size = batch_size

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's images and labels in a step. Each epoch goes through all images in another order."""
        images, labels = self._train
        all_ranks = self.batch_size * dist.get_world_size()
        epoch, place = divmod(step, max(1, len(labels) // all_ranks))
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        first = place * all_ranks + dist.get_rank() * self.batch_size
        mine = order[first : first + self.batch_size]
        return images[mine], labels[mine]

    def test_batches(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's share of the test images."""
        images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in self._test)
        return list(zip(images.split(64), labels.split(64), strict=True))


class Course:
    """One arm's way through the batches. `losses` has this rank's loss of every step so far."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self.losses: list[Tensor] = []

    def loss(self, network: nn.Module) -> Tensor:
        """One forward of the next batch."""
        step = len(self.losses)
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())  # dropout is the same in every arm
        images, labels = self._images.batch(step)
        logits: Any = network(images)
        loss = nn.functional.cross_entropy(logits, labels)
        self.losses.append(loss.detach())
        return loss
