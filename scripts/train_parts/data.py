"""Images for `train.py`: scikit-learn's bundled digits, or a folder of one's own.

Every rank gets the same number of training batches (DDP needs that), and every test image goes to
exactly one rank (so that accuracy counts nothing twice).
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ddp_crossover as dx

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load_digits(image_size: int) -> tuple[Dataset[Any], Dataset[Any], int]:
    """1,797 hand-written digits of 8x8 pixels: (train, test, number of classes). Needs no download.

    Images become `[3, image_size, image_size]` float32 with mean 0 and standard deviation 1. The
    split, 1,437 to 360 with classes in proportion, is always the same: `--seed` does not move it.
    """
    from sklearn.datasets import load_digits as sklearn_digits
    from sklearn.model_selection import train_test_split

    digits = sklearn_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1)
    images = torch.nn.functional.interpolate(images, size=(image_size, image_size), mode="bilinear")
    labels = torch.from_numpy(digits.target).long()
    train, test = train_test_split(torch.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    images = (images - images[train].mean()) / images[train].std()
    images = images.expand(-1, 3, -1, -1)
    return (
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[test], labels[test]),
        10,
    )


def load_image_folder(
    path: Path, image_size: int, shrink: int | None = None, cache: Path | None = None
) -> tuple[Dataset[Any], Dataset[Any], int]:
    """`path/train/<class>/*.jpg` and `path/val/<class>/*.jpg`: (train, val, number of classes).

    With `cache` decoded images are kept there, with what is the same in each epoch done to them.
    """
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    missing = [part for part in ("train", "val") if not (path / part).is_dir()]
    if missing:
        raise ValueError(
            f"--data {path} has no folder {' and no folder '.join(missing)}. It needs "
            f"train/<class>/<image> and val/<class>/<image>."
        )
    normalise = [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    shrunk = [transforms.Resize(shrink)] if shrink else []
    augment = [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip()]
    centre = [transforms.Resize(round(image_size * 256 / 224)), transforms.CenterCrop(image_size)]
    try:
        train, val = ImageFolder(path / "train"), ImageFolder(path / "val")
    except FileNotFoundError as error:  # a folder without classes, or a class without images
        raise ValueError(f"--data {path}: {error}") from error
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise ValueError(f"--data {path}: train/ and val/ differ in their classes: {odd[:5]}")

    def transformed(folder: ImageFolder, same_each_time: list[Any], each_time: list[Any]) -> Dataset[Any]:
        if cache is None:
            folder.transform = transforms.Compose(same_each_time + each_time)
            return folder
        cached, live = transforms.Compose(same_each_time), transforms.Compose(each_time)
        return dx.data.CachedDataset(folder, cached=cached, live=live, dir=cache)

    classes = len(train.classes)
    return transformed(train, shrunk, augment + normalise), transformed(val, centre, normalise), classes


def make_loaders(args: argparse.Namespace, pin_memory: bool) -> tuple[DataLoader[Any], DataLoader[Any], int]:
    """This rank's share of training and test images, and the number of classes.

    The training loader's sampler wants `set_epoch` before each epoch.
    """
    if args.data:
        train, test, classes = load_image_folder(args.data, args.image_size, args.shrink, args.cache)
    else:
        train, test, classes = load_digits(args.image_size)
    if args.limit_samples:
        train, test = (_spread(dataset, args.limit_samples) for dataset in (train, test))
    world_size, batch = dist.get_world_size(), args.batch_size
    # What fills no whole batch is dropped: BatchNorm cannot train on a batch of one, and each epoch
    # drops other images.
    sampler: DistributedSampler[Any] = DistributedSampler(train, shuffle=True, seed=args.seed, drop_last=True)
    train_loader = DataLoader(
        train,
        batch,
        sampler=sampler,
        drop_last=True,
        num_workers=args.workers,
        pin_memory=pin_memory,
    )
    if len(train_loader) == 0:
        raise ValueError(
            f"--batch-size {batch} on {world_size} rank(s) needs {batch * world_size} training "
            f"images, and there are {len(train)}: take a smaller batch"  # type: ignore[arg-type]
        )
    # Not a DistributedSampler: it repeats images until all ranks have equally many.
    mine = Subset(test, range(dist.get_rank(), len(test), world_size))  # type: ignore[arg-type]
    test_loader = DataLoader(mine, batch, num_workers=args.workers, pin_memory=pin_memory)
    return train_loader, test_loader, classes


def _spread(dataset: Dataset[Any], count: int) -> Dataset[Any]:
    """At most `count` samples, evenly spread (a folder is sorted by class, its start is of one)."""
    size = len(dataset)  # type: ignore[arg-type]
    count = min(count, size)
    return Subset(dataset, [index * size // count for index in range(count)])
