"""`dx.data.CachedDataset` as users see it: the same samples with and without it, whatever happens to the disk."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_sample_codec import same
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import ddp_crossover as dx
import pictures
from ddp_crossover.addons.data.sample_store import INDEX, SAMPLES
from matrix import often
from pictures import make_folder

COUNT = 24
ROOT = Path(__file__).parents[3]
CACHED = v2.Compose([v2.Resize((24, 24)), v2.PILToTensor()])
LIVE = v2.Compose([v2.RandomCrop(16), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])

pytestmark = pytest.mark.xdist_group("cached_dataset")


class Counting(Dataset[Any]):
    """Counts how often a sample is made, in this process."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        pictures.made = 0

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        pictures.made += 1
        return self.dataset[index]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    make_folder(root, COUNT)
    return root


def samples(dataset: Dataset[Any]) -> list[Any]:
    return [dataset[index] for index in range(len(dataset))]  # type: ignore[arg-type]


def global_states() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1:], torch.get_rng_state()]


@pytest.mark.parametrize("cached", [None, CACHED, v2.Resize(20), np.asarray], ids=["none", "tensor", "image", "array"])
def test_a_hit_is_the_same_as_a_miss_and_as_no_cache(folder: Path, tmp_path: Path, cached: Any) -> None:
    images = Counting(ImageFolder(folder))
    without = [(image if cached is None else cached(image), label) for image, label in samples(images)]
    # Both at once: the digest covers what the data set's code uses of modules, and so the counter.
    data, again = (dx.data.CachedDataset(images, cached=cached, dir=tmp_path) for _ in range(2))
    misses = samples(data)
    made = pictures.made
    assert same(samples(data), misses) and same(samples(again), misses)
    assert pictures.made == made
    assert same(misses, without)


def test_live_runs_each_time_with_the_same_random_numbers(folder: Path, tmp_path: Path) -> None:
    images = ImageFolder(folder)
    plain = ImageFolder(folder, transform=v2.Compose([CACHED, LIVE]))
    data = dx.data.CachedDataset(images, cached=CACHED, live=LIVE, dir=tmp_path)
    epochs = []
    for dataset in (plain, data, data):
        torch.manual_seed(0)
        epochs.append([samples(dataset) for _ in range(2)] + [global_states()])
    assert same(epochs[0][:2], epochs[1][:2]) and same(epochs[1][:2], epochs[2][:2])
    assert not same(epochs[0][0], epochs[0][1])
    assert str(epochs[0][2]) == str(epochs[1][2]) == str(epochs[2][2])


@pytest.mark.parametrize(("workers", "start"), often([(4, "fork"), (2, "spawn")], (4, "fork")))
def test_workers_fill_it_and_read_it(folder: Path, tmp_path: Path, workers: int, start: str) -> None:
    data = dx.data.CachedDataset(ImageFolder(folder), cached=CACHED, live=LIVE, dir=tmp_path)
    plain = ImageFolder(folder, transform=v2.Compose([CACHED, LIVE]))
    epochs = []
    for dataset in (plain, data, data):
        torch.manual_seed(0)
        loader = DataLoader(dataset, 4, shuffle=True, num_workers=workers, multiprocessing_context=start)
        epochs.append([tuple(batch) for batch in loader])
    assert same(epochs[0], epochs[1]) and same(epochs[1], epochs[2])
    stored = dx.data.CachedDataset(Counting(ImageFolder(folder)), cached=CACHED, dir=tmp_path, version="other")
    assert stored._store is not None
    assert len(list(tmp_path.glob(f"*/{INDEX}"))) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda images: TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3)),
        lambda images: Subset(images, [3, 1]),
        lambda images: [torch.ones(2), {"a": 1}, "text", None],
        lambda images: [{"image": image, "label": label} for image, label in (images[0], images[1])],
    ],
    ids=["tensors", "subset", "list", "dicts"],
)
def test_any_map_style_data_set(folder: Path, tmp_path: Path, make: Any) -> None:
    dataset = make(ImageFolder(folder))
    data = dx.data.CachedDataset(dataset, dir=tmp_path, version="1")
    first = samples(data)
    assert same(first, samples(dataset)) and same(samples(data), first)


def test_numbers_are_those_of_the_data_set(tmp_path: Path) -> None:
    data = dx.data.CachedDataset([10, 11, 12], dir=tmp_path)
    assert len(data) == 3
    assert [data[-1], data[np.int64(1)], data[torch.tensor(0)]] == [12, 11, 10]
    for index in (3, -4):
        with pytest.raises(IndexError):
            data[index]
    with pytest.raises(TypeError):
        data["a"]


def test_what_a_sample_is_made_with_decides_which_cache_it_is_in(folder: Path, tmp_path: Path) -> None:
    for cached in (v2.Resize(8), v2.Resize(9), v2.Resize(8)):
        dx.data.CachedDataset(ImageFolder(folder), cached=cached, dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    for version in ("1", "2", "1"):
        dx.data.CachedDataset(ImageFolder(folder), cached=v2.Resize(8), dir=tmp_path, version=version)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    make_folder(tmp_path / "pictures", 4)
    before = samples(dx.data.CachedDataset(ImageFolder(tmp_path / "pictures"), dir=tmp_path / "cache"))
    path = Path(ImageFolder(tmp_path / "pictures").samples[0][0])
    Image.new("RGB", (40, 32)).save(path)
    after = samples(dx.data.CachedDataset(ImageFolder(tmp_path / "pictures"), dir=tmp_path / "cache"))
    assert not same(before[0], after[0]) and same(before[1:], after[1:])


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "SFC64"])
def test_numpy_may_draw_from_any_bit_generator(folder: Path, tmp_path: Path, kind: str) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(getattr(np.random, kind)())
    try:
        data = dx.data.CachedDataset(Counting(ImageFolder(folder)), dir=tmp_path / "still", version="1")
        assert same(data[0], data[0]) and pictures.made == 1
        drawing = dx.data.CachedDataset(
            Counting(ImageFolder(folder)), cached=lambda _: np.random.rand(), dir=tmp_path / "draws", version="1"
        )
        assert not same(drawing[0], drawing[0]) and pictures.made == 2
    finally:
        np.random.set_bit_generator(before)


def test_random_transforms_in_the_wrong_place_are_not_stored(folder, tmp_path, caplog) -> None:
    data = dx.data.CachedDataset(ImageFolder(folder), cached=v2.RandomCrop(16), dir=tmp_path)
    torch.manual_seed(0)
    one, other = samples(data), samples(data)
    plain = ImageFolder(folder, transform=v2.RandomCrop(16))
    torch.manual_seed(0)
    assert same([one, other], [samples(plain), samples(plain)])
    assert not same(one, other)
    assert caplog.text.count("draws random numbers. Random transforms belong in live=") == 1


def test_a_sample_that_cannot_be_stored_is_made_each_time(tmp_path, caplog) -> None:
    data = dx.data.CachedDataset(Counting([1, {2, 3}, 4]), dir=tmp_path)
    assert samples(data) == samples(data) == [1, {2, 3}, 4]
    assert pictures.made == 4
    assert caplog.text.count("sample 1 is made each time: it holds a builtins.set") == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root, to mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_disk_costs_speed_and_nothing_else(folder, small_disk, caplog, workers) -> None:
    plain = samples(ImageFolder(folder, transform=np.asarray))
    for _ in range(2):
        data = dx.data.CachedDataset(ImageFolder(folder), cached=np.asarray, dir=small_disk)
        for _ in range(2):
            loaded = list(DataLoader(data, None, num_workers=workers, collate_fn=lambda sample: sample))
            assert same([tuple(one) for one in loaded], plain)
    if not workers:
        assert caplog.text.count("can store no more (No space left on device) than ") == 1
    data = dx.data.CachedDataset(Counting(ImageFolder(folder)), cached=np.asarray, dir=small_disk)
    assert len(list(small_disk.iterdir())) == 2


def test_without_a_usable_directory_samples_are_made_each_time(tmp_path, caplog, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    data = dx.data.CachedDataset(Counting([1, 2]), dir=tmp_path / "file")
    assert samples(data) == samples(data) == [1, 2]
    assert pictures.made == 4
    assert "no data cache, so samples are made each time: " in caplog.text
    monkeypatch.setenv("LOCAL_RANK", "1")
    caplog.clear()
    dx.data.CachedDataset([1, 2], dir=tmp_path / "file")
    assert caplog.text == ""


def test_a_directory_that_goes_away_in_mid_run_loses_nothing(folder: Path, tmp_path: Path) -> None:
    data = dx.data.CachedDataset(ImageFolder(folder), cached=CACHED, dir=tmp_path / "cache")
    before = samples(data)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no directory")
    for workers in (0, 2):
        loaded = DataLoader(data, None, num_workers=workers)
        assert same([tuple(one) for one in loaded], before)


def test_exceptions_of_the_data_set_are_its_own(tmp_path: Path) -> None:
    class Broken(Counting):
        def __getitem__(self, index: int) -> Any:
            raise OSError("no such picture")

    with pytest.raises(OSError, match="no such picture"):
        dx.data.CachedDataset(Broken([1]), dir=tmp_path)[0]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dataset": Stream()}, TypeError, "give a map-style data set"),
        ({"dataset": 3}, TypeError, "dataset=int: give a map-style data set"),
        ({"max_gb": 0}, ValueError, "max_gb=0: give a number of gigabytes above 0"),
        ({"dataset": [np.random.default_rng(0)]}, ValueError, "dataset= holds a .*Generator.*: give version="),
        ({"cached": [torch.Generator()].index}, ValueError, "cached= holds .*: give version="),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        dx.data.CachedDataset(**({"dataset": [1], "dir": tmp_path} | arguments))


def cache_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_crossover", "cache", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_lists_checks_and_clears(folder: Path, tmp_path: Path) -> None:
    data = dx.data.CachedDataset(ImageFolder(folder), cached=v2.Resize(8), dir=tmp_path)
    samples(data)
    dx.data.CachedDataset([1, 2, 3], dir=tmp_path)[0]
    done = cache_command("info", tmp_path, "--json", "--check")
    rows = sorted(json.loads(done.stdout), key=lambda row: row["samples"])
    assert [(row["stored"], row["samples"], row["damaged"]) for row in rows] == [(1, 3, 0), (COUNT, COUNT, 0)]
    shown = cache_command("info", tmp_path)
    assert "24 of 24 samples" in shown.stdout and "1 of 3 samples" in shown.stdout and "Resize(size=[8]" in shown.stdout

    path = tmp_path / rows[1]["key"] / SAMPLES
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert cache_command("info", tmp_path).returncode == 0
    checked = cache_command("info", tmp_path, "--check")
    assert checked.returncode == 1 and "24 of 24 samples, 1 damaged" in checked.stdout

    assert cache_command("clear", tmp_path, "nothing").returncode == 2
    assert cache_command("clear", tmp_path, "").returncode == 2
    assert cache_command("clear", tmp_path, rows[0]["key"][:6]).stdout.startswith("removed ")
    assert [path.name for path in tmp_path.iterdir()] == [rows[1]["key"]]
    assert cache_command("clear", tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []
    assert samples(data) == samples(data), "a job that used it goes on"
    assert cache_command("clear", tmp_path).stdout == "nothing to remove\n"
    (tmp_path / "train").mkdir()
    for name in ("index", "samples"):
        (tmp_path / "train" / name).write_text("mine")  # somebody else's files of these names
    assert cache_command("clear", tmp_path).stdout == "nothing to remove\n"
    assert len(list((tmp_path / "train").iterdir())) == 2
    missing = cache_command("info", tmp_path / "none")
    assert missing.returncode == 2 and "is no directory" in missing.stderr
