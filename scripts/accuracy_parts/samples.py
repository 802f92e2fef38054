"""Training and test samples as tensors, and the batches of each rank."""

import pydoc_data.topics
from typing import NamedTuple

import torch
from torch import Tensor

from train_parts.data import load_digits

IMAGE_SIZE = 8
WINDOW_BYTES = 64
TEST_SHARE = 0.1


class Samples(NamedTuple):
    """Inputs and targets, with one sample in each row."""

    inputs: Tensor
    targets: Tensor


class Data(NamedTuple):
    """What one task is trained on, and tested with."""

    train: Samples
    test: Samples


def digits() -> Data:
    """The 1,797 digits of scikit-learn: `[n, 1, 8, 8]` float32, and `[n]` labels."""
    train, test, _ = load_digits(IMAGE_SIZE)
    # They come as three equal channels.
    parts = [Samples(images[:, :1].contiguous(), labels) for images, labels in (train.tensors, test.tensors)]  # type: ignore[attr-defined]
    return Data(*parts)


def topics() -> Data:
    """The language reference that Python carries for `help()`, in windows of bytes: `[n, 64]` int64 twice.

    The target of each byte is the next one. The last tenth of the text is for the test.
    """
    text = torch.frombuffer(bytearray(topics_text()), dtype=torch.uint8).long()
    test_start = int(len(text) * (1 - TEST_SHARE))
    return Data(_windows(text[:test_start]), _windows(text[test_start:]))


def topics_text() -> bytes:
    """The text of all topics, which differs between versions of Python."""
    return "\n".join(pydoc_data.topics.topics.values()).encode()


def _windows(text: Tensor) -> Samples:
    windows = (len(text) - 1) // WINDOW_BYTES
    inputs = text[: windows * WINDOW_BYTES].view(windows, WINDOW_BYTES)
    targets = text[1 : windows * WINDOW_BYTES + 1].view(windows, WINDOW_BYTES)
    return Samples(inputs, targets)


def batch(samples: Samples, step: int, seed: int, *, batch_size: int, rank: int, world_size: int) -> Samples:
    """The samples of one rank in one step. Each epoch goes through all of them in another order.

    Raises:
        ValueError: if there are fewer samples than one step of all ranks takes.
    """
    all_ranks = batch_size * world_size
    steps_per_epoch = len(samples.inputs) // all_ranks
    if not steps_per_epoch:
        raise ValueError(
            f"{world_size} ranks take {all_ranks} samples in a step, and there are {len(samples.inputs)}: use fewer "
            "--ranks"
        )
    epoch, place = divmod(step, steps_per_epoch)
    generator = torch.Generator().manual_seed(1_000_000 * seed + epoch)
    order = torch.randperm(len(samples.inputs), generator=generator)
    first = place * all_ranks + rank * batch_size
    mine = order[first : first + batch_size]
    return Samples(samples.inputs[mine], samples.targets[mine])
