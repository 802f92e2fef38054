"""Training on two ranks with and without a cache has the same bits: any workers, started either way, and resumed."""

from __future__ import annotations

import itertools
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import ddp_crossover as dx
from matrix import often
from pictures import make_folder

PICTURES = 48
BATCH = 4
CACHED = v2.Compose([v2.Resize((20, 20)), v2.PILToTensor()])
LIVE = v2.Compose([v2.RandomCrop(16), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])

pytestmark = pytest.mark.xdist_group("training_with_a_cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    make_folder(root, PICTURES)
    return root


class Job:
    """One training job: two epochs, which it can leave and go on with at any batch."""

    def __init__(self, dataset: Dataset[Any], workers: int, start: str | None) -> None:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it has workers
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(196, 2))
        self.ddp = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=0.9)
        self.state = dx.attach(self.ddp, self.optimizer, fusion_mb=1e-3)
        self.sampler: DistributedSampler[Any] = DistributedSampler(dataset, drop_last=True)
        of_workers = {"multiprocessing_context": start, "persistent_workers": True} if workers else {}
        self.loader = DataLoader(dataset, BATCH, sampler=self.sampler, num_workers=workers, **of_workers)

    def train(self, first: int, last: int) -> None:
        """Train batches `first` to `last` of both epochs together, `last` excluded."""
        batches = len(self.loader)
        for epoch in range(2):
            self.sampler.set_epoch(epoch)
            torch.manual_seed(100 * epoch + dist.get_rank())
            for number, (x, y) in enumerate(self.loader, epoch * batches):
                if first <= number < last:
                    self.optimizer.zero_grad()
                    nn.functional.cross_entropy(self.ddp(x), y).backward()
                    self.optimizer.step()

    def save(self) -> dict[str, Any]:
        return {"model": self.ddp.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, saved: dict[str, Any]) -> None:
        self.ddp.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def end(self) -> list[torch.Tensor]:
        self.state.detach()
        return [parameter.detach().clone() for parameter in self.ddp.parameters()]


def _train(
    folder: Path, cache: Path | None, workers: int, start: str | None, stop_at: int | None
) -> list[torch.Tensor]:
    images = ImageFolder(folder)
    dataset: Dataset[Any]
    if cache is None:
        dataset = ImageFolder(folder, transform=v2.Compose([CACHED, LIVE]))
    else:
        dataset = dx.data.CachedDataset(images, cached=CACHED, live=LIVE, dir=cache)
    job = Job(dataset, workers, start)
    if stop_at is None:
        job.train(0, 10**6)
        return job.end()
    job.train(0, stop_at)
    saved = job.save()
    saved = {"model": {k: v.clone() for k, v in saved["model"].items()}, "optimizer": saved["optimizer"]}
    job.end()
    again = Job(dataset, workers, start)
    again.load(saved)
    again.train(stop_at, 10**6)
    return again.end()


@pytest.mark.parametrize(
    ("workers", "start"),
    often([(0, None), (2, "fork"), (2, "spawn"), (4, "fork"), (4, "spawn")], (0, None), (2, "fork")),
)
def test_a_cache_changes_no_bit(on_ranks: Any, folder: Path, tmp_path: Path, workers: int, start: str | None) -> None:
    # Workers have the same random numbers, however they were started; spawned ones take seconds to start.
    runs = [(None, "fork" if workers else None, None), (tmp_path, start, None), (tmp_path, start, None)]
    if start == "spawn" and workers == 2:
        del runs[-1]
    if workers < 4:
        runs.append((tmp_path / "other", start, 4))
    without, *others = (on_ranks(_train, 2, folder, cache, workers, how, stop_at) for cache, how, stop_at in runs)
    for ours in itertools.chain(*others):
        assert all(torch.equal(one, other) for one, other in zip(ours, without[0], strict=True))
