"""The tasks: data, network, optimizer, and how long each is trained."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from accuracy_parts import samples
from accuracy_parts.networks import ByteGpt, SmallResNet18
from accuracy_parts.samples import Data

# Losses of single batches differ: the final training loss is the mean over this share of all steps.
FINAL_SHARE = 0.1


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as on the command line.
        title: as above tables and pictures.
        steps: unless `--steps` says otherwise.
        batch_size: samples per rank and step.
        optimizer: what `make_optimizer` makes, in words.
        load: makes the data.
        build: makes the network, from torch's global seed.
        make_optimizer: makes the optimizer; its learning rate is the highest one of the schedule.
    """

    name: str
    title: str
    steps: int
    batch_size: int
    optimizer: str
    load: Callable[[], Data]
    build: Callable[[], nn.Module]
    make_optimizer: Callable[[Iterable[Parameter]], Optimizer]


TASKS = {
    task.name: task
    for task in (
        Task(
            name="digits",
            title="ResNet-18 (16 channels) on scikit-learn's digits",
            steps=300,
            batch_size=32,
            optimizer="SGD, learning rate 0.01, momentum 0.9, weight decay 5e-4",
            load=samples.digits,
            build=SmallResNet18,
            make_optimizer=lambda parameters: SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4),
        ),
        Task(
            name="text",
            title="Transformer on bytes of Python's reference",
            steps=400,
            batch_size=16,
            optimizer="AdamW, learning rate 3e-3, weight decay 0.01",
            load=samples.topics,
            build=ByteGpt,
            make_optimizer=lambda parameters: AdamW(parameters, lr=3e-3, weight_decay=0.01),
        ),
    )
}


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats, over samples and places."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def final_window(steps: int) -> int:
    """The number of steps that the final training loss is the mean of."""
    return max(1, round(FINAL_SHARE * steps))
