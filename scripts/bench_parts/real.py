"""Real compute: networks small enough, or with batches small enough, for a processor core per rank."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench_kit.training import Workload

CLASSES = 1000
BERT_VOCABULARY = 30522


def _classifier(
    name: str, pixels: int, batch: int, units: Callable[[nn.Module], list[nn.Module]], **options: int
) -> Callable[[int], Workload]:
    return lambda tokens: classifier(name, pixels, batch, units, torch.device("cpu"), **options)


def classifier(
    name: str,
    pixels: int,
    batch: int,
    units: Callable[[nn.Module], list[nn.Module]],
    device: torch.device,
    **options: int,
) -> Workload:
    """One of torchvision's networks, with one batch of noise on a device."""
    # Imported here because it takes a second or two, and paced layers need none of it.
    import torchvision

    images = torch.randn(batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(1)).to(device)
    labels = (torch.arange(batch) % CLASSES).to(device)
    return Workload(
        lambda: torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options).to(device),
        lambda network: nn.functional.cross_entropy(network(images), labels),
        units,
    )


def children_of(*names: str) -> Callable[[nn.Module], list[nn.Module]]:
    """All children with parameters of the submodules with these names."""

    def units(network: nn.Module) -> list[nn.Module]:
        children = [child for name in names for child in network.get_submodule(name).children()]
        return [child for child in children if next(child.parameters(), None) is not None]

    return units


class Encoder(nn.Module):
    """Token embedding, `TransformerEncoder` layers, a linear head."""

    def __init__(self, vocabulary: int, width: int, heads: int, hidden: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(layers)
            )
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(self.embedding(ids)))
        return result


def encoder(
    build: Callable[[], Encoder], sequence: int, ids_below: int, batch: int, outputs: int, device: torch.device
) -> Workload:
    """An encoder that classifies every token of one batch of noise on a device."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(ids_below, (batch, sequence), generator=generator).to(device)
    labels = torch.randint(outputs, (batch * sequence,), generator=generator).to(device)
    return Workload(
        lambda: build().to(device),
        lambda network: nn.functional.cross_entropy(network(ids).flatten(0, 1), labels),
        children_of("layers"),
    )


def _transformer(tokens: int) -> Workload:
    """12.7 M parameters: 4 layers of width 512, in sequences of 32 tokens."""
    if tokens < 32 or tokens % 32:
        raise ValueError(f"--tokens {tokens}: give a multiple of 32, the length of a sequence")
    return encoder(lambda: Encoder(96, 512, 8, 2048, 4, 96), 32, 96, tokens // 32, 96, torch.device("cpu"))


def bert_base() -> Encoder:
    """The shape of BERT-base with its vocabulary as input (108 M parameters), 2 classes."""
    return Encoder(BERT_VOCABULARY, 768, 12, 3072, 12, 2)


def _bert_base(tokens: int) -> Workload:
    """BERT-base, with 4 sequences of 64 tokens."""
    return encoder(bert_base, 64, BERT_VOCABULARY, 4, 2, torch.device("cpu"))


# Each is called with the number of tokens, which only `transformer` uses.
MODELS: dict[str, Callable[[int], Workload]] = {
    "transformer": _transformer,
    "resnet50": _classifier("resnet50", 96, 8, children_of("layer1", "layer2", "layer3", "layer4")),
    "densenet201": _classifier("densenet201", 96, 4, children_of("features")),
    "vit_b_16": _classifier("vit_b_16", 96, 8, children_of("encoder.layers"), image_size=96),
    "bert_base": _bert_base,
}
