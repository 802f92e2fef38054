"""The tasks: data, network, optimizer, and how long each is trained."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import SGD, AdamW, Optimizer
from torchvision.models.resnet import BasicBlock, ResNet

from accuracy_parts import samples
from accuracy_parts.samples import WINDOW_BYTES, Data

# ImageNet's ResNet-18 begins with 64 channels. With 16 a step takes an eighth of the time.
RESNET_CHANNELS = 16
CLASSES = 10
BLOCKS, WIDTH, HEADS = 2, 128, 4
BYTES = 256


class SmallResNet18(ResNet):  # type: ignore[misc]  # torchvision has no types
    """torchvision's ResNet-18, narrower, and with a stem that keeps 8x8 pixels: 3x3, stride 1, no pooling."""

    def __init__(self, channels: int = RESNET_CHANNELS) -> None:
        super().__init__(BasicBlock, [2, 2, 2, 2])
        # ResNet has no parameter for its width; layers built anew take it from `inplanes`.
        self.inplanes = channels
        self.conv1 = nn.Conv2d(1, channels, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.maxpool = nn.Identity()
        self.layer1 = self._make_layer(BasicBlock, channels, 2)
        self.layer2 = self._make_layer(BasicBlock, 2 * channels, 2, stride=2)
        self.layer3 = self._make_layer(BasicBlock, 4 * channels, 2, stride=2)
        self.layer4 = self._make_layer(BasicBlock, 8 * channels, 2, stride=2)
        self.fc = nn.Linear(8 * channels, CLASSES)


class _Block(nn.Module):
    """Causal attention and an MLP, each after a layer norm and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return x


class ByteGpt(nn.Module):
    """Predicts the next byte at each place of a window: `[n, t]` int64 to `[n, t, 256]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(BYTES, WIDTH), nn.Embedding(WINDOW_BYTES, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)
        for embedding in (self.embedding, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x) + self.place(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(embedded)))


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
