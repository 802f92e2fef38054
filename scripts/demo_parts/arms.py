"""The arms of the demo, plain DDP with some bucket size, DeAR and compute alone, and the images that they train on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import ddp_crossover as dx
from bench_kit.slow_link import Connections, slow_groups
from bench_kit.training import Arm, Workload
from train_parts.data import load_digits


class Images:
    """Scikit-learn's hand-written digits (no download), in the same order for every arm.

    Args:
        image_size: pixels to which the 8x8 images are enlarged.
        batch_size: images per rank and step; may be changed before training begins.
    """

    def __init__(self, image_size: int, batch_size: int) -> None:
        train, _, self.classes = load_digits(image_size)
        self._train: tuple[Tensor, Tensor] = train.tensors  # type: ignore[attr-defined]
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


THIS = "this (DeAR)"
MOMENTUM = 0.9
LEARNING_RATE = 0.02

Attach = Callable[[DistributedDataParallel, Optimizer], dx.DearState | None]


@dataclass
class DemoArm:
    """One way to train the same model on the same images.

    Attributes:
        label: its name in the table and in the picture.
        arm: takes steps and times them.
        course: the batches it has seen, and its losses.
        ddp: the wrapped model.
        optimizer: its optimizer.
        group: the process group of DDP.
        links: for each process group, its connections: DDP's own, and with DeAR also those that carry gradients.
    """

    label: str
    arm: Arm
    course: Course
    ddp: DistributedDataParallel
    optimizer: Optimizer
    group: dist.ProcessGroup
    links: list[Connections] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.course.losses)

    @property
    def is_left_alone(self) -> bool:
        """Whether the tuner has found nothing faster than DDP's own all-reduces, so that nothing of DeAR is left."""
        return self.arm.state is not None and self.arm.state.detached

    @property
    def open_links(self) -> list[Connections]:
        """Those of `links` that are still there: DDP that was left alone has only its own."""
        return self.links[:1] if self.is_left_alone else self.links

    def pace(self, bytes_per_s: float | None) -> None:
        """Change the speed of its connections."""
        for link in self.open_links:
            link.pace(bytes_per_s)

    def sent_bytes(self) -> list[int]:
        """Bytes sent so far over each of `open_links`."""
        return [link.sent_bytes() for link in self.open_links]

    def catch_up(self, steps: int) -> None:
        """Train untimed until this many steps are done."""
        while self.steps < steps:
            self.arm.step()
        self.arm.drain()

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers, with every update applied."""
        state: dict[str, Tensor] = self.ddp.module.state_dict()
        return state


@dataclass(frozen=True)
class Factory:
    """Makes arms that start from the same weights.

    Attributes:
        build: makes the network.
        images: what it is trained on.
    """

    build: Callable[[], nn.Module]
    images: Images

    def ddp(self, bucket_mb: float | None, bytes_per_s: float | None) -> DemoArm:
        """Plain DDP with this `bucket_cap_mb`; None: as it comes, which is 25 MB after a first bucket of 1 MB."""
        label = "DDP as it comes" if bucket_mb is None else f"DDP, {bucket_mb:g} MB"
        return self._make(label, bytes_per_s, bucket_cap_mb=bucket_mb)

    def dear(self, bytes_per_s: float | None, *, tune: bool) -> DemoArm:
        """DDP as it comes, with one line more."""
        return self._make(THIS, bytes_per_s, lambda ddp, optimizer: dx.attach(ddp, optimizer, tune=tune))

    def compute_alone(self) -> DemoArm:
        """DDP without communication: its models differ between ranks, only its time counts."""
        demo_arm = self._make("compute alone", None)
        demo_arm.ddp.register_comm_hook(None, noop_hook)
        return demo_arm

    def _make(
        self, label: str, bytes_per_s: float | None, attach: Attach = lambda ddp, optimizer: None, **ddp_options: Any
    ) -> DemoArm:
        torch.manual_seed(0)
        network, course = self.build(), Course(self.images)
        workload = Workload(self.build, course.loss, lambda network: [])
        with slow_groups(bytes_per_s) as links:
            group = dist.new_group()
            assert isinstance(group, dist.ProcessGroup)
            ddp = DistributedDataParallel(network, process_group=group, gradient_as_bucket_view=True, **ddp_options)
            optimizer = SGD(ddp.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
            state = attach(ddp, optimizer)
        return DemoArm(label, Arm(workload, ddp, optimizer, state), course, ddp, optimizer, group, links)
