"""Ways to load the pictures. All deliver the same: resized to 256, a random crop of 224, flipped or not, as floats."""

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import ddp_crossover as dx

RESIZED = v2.Compose([v2.Resize(256), v2.CenterCrop(256), v2.PILToTensor()])
LIVE = v2.Compose([v2.RandomCrop(224), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])


class Loading(NamedTuple):
    """What a rank loads with: `epoch(number)` gives the batches of an epoch."""

    epoch: Callable[[int], Iterable[Any]]


class Plan(NamedTuple):
    """Where the pictures and this turn's cache are, and the loader's numbers."""

    pictures: Path
    cache: Path
    workers: int
    batch: int


class Arm(NamedTuple):
    """One way, and what the help says of it. `package`: what it needs to be installed."""

    meaning: str
    make: Callable[[Plan], Loading]
    package: str | None = None


def why_not(arm: str) -> str | None:
    """Why this arm cannot run here, or None."""
    package = ARMS[arm].package
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"it needs {package}: pip install {package}"


class KeptInProcess(Dataset[Any]):
    """What is often done: each process keeps what it has decoded, for itself."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        self.kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if index not in self.kept:
            self.kept[index] = self.dataset[index]
        image, label = self.kept[index]
        return LIVE(image), label


def _loading(dataset: Dataset[Any], plan: Plan) -> Loading:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(
        dataset, plan.batch, sampler=sampler, num_workers=plan.workers, persistent_workers=True, prefetch_factor=2
    )

    def epoch(number: int) -> Iterable[Any]:
        sampler.set_epoch(number)
        return loader

    return Loading(epoch)


def _live(plan: Plan) -> Loading:
    return _loading(ImageFolder(plan.pictures, v2.Compose([RESIZED, LIVE])), plan)


def _kept(plan: Plan) -> Loading:
    return _loading(KeptInProcess(ImageFolder(plan.pictures, RESIZED)), plan)


def _cached(plan: Plan) -> Loading:
    images = ImageFolder(plan.pictures)
    return _loading(dx.data.CachedDataset(images, cached=RESIZED, live=LIVE, dir=plan.cache), plan)


class Resized:
    """What litdata calls for each picture when it writes its chunks."""

    def __init__(self, images: ImageFolder) -> None:
        self.images = images

    def __call__(self, index: int) -> Any:
        image, label = self.images[index]
        return RESIZED(image), label


def _live_of_pair(sample: Any) -> Any:
    return LIVE(sample[0]), sample[1]


def _litdata(plan: Plan) -> Loading:
    import litdata

    loaders: list[Any] = []

    def epoch(number: int) -> Iterable[Any]:
        # It writes all chunks before the first epoch, in one process for each worker of all ranks.
        if not loaders:
            if dist.get_rank() == 0:
                images = ImageFolder(plan.pictures)
                litdata.optimize(
                    Resized(images), list(range(len(images))), str(plan.cache), chunk_bytes="64MB",
                    num_workers=plan.workers * dist.get_world_size(), verbose=False,
                )  # fmt: skip
            dist.barrier()
            dataset = litdata.StreamingDataset(str(plan.cache), shuffle=True, transform=_live_of_pair)
            loaders.append(
                litdata.StreamingDataLoader(
                    dataset, batch_size=plan.batch, num_workers=plan.workers, persistent_workers=True
                )
            )
        return loaders[0]  # type: ignore[no-any-return]

    return Loading(epoch)


ARMS = {
    "live": Arm("decodes each picture each time", _live),
    "kept": Arm("each process keeps what it has decoded, in its own memory", _kept),
    "cached": Arm("dx.data.CachedDataset", _cached),
    "litdata": Arm("writes its chunks first, then streams them from the same disk", _litdata, "litdata"),
}
