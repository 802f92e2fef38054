"""A data set whose decoded samples stay on local disk: decoded once, one copy in memory for all ranks of a host.

Source: the multi-level data cache of Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public
Cloud Clusters", MLSys 2021, without its level in each process: the page cache does that for all of them.
"""

from __future__ import annotations

import logging
import operator
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from ddp_crossover.addons.data.about import FORMAT_VERSION, write_about
from ddp_crossover.addons.data.fingerprint import NoFingerprint, decoder_versions, fingerprint
from ddp_crossover.addons.data.sample_codec import NotStorable, decode, encode
from ddp_crossover.addons.data.sample_store import Notice, SampleStore, StoreRefused
from ddp_crossover.log import say

Transform = Callable[[Any], Any]


class CachedDataset(Dataset[Any]):
    """A map-style data set that keeps what ``cached`` makes of each sample on local disk, and reads it from there.

    Where samples are tuples or lists, both transforms get and replace the first item, such as the image, and the
    others, such as the label, are kept with it. Any other sample they get whole. Samples may hold tensors on the CPU,
    arrays, PIL images, numbers, text and bytes, in tuples, lists and dicts. An image comes back with its mode and
    pixels, as a plain ``PIL.Image.Image``; that holds for the first time as well, so a stored sample equals a new one.

    All ranks, workers and jobs with the same data set and the same ``cached`` share one cache, while it is being
    filled, too. What cannot be stored or read is made anew each time, and one line says why: a full disk, a damaged
    file, a sample of another kind, or a data set or ``cached`` that draws from the global random numbers.

    The digest is that of the data set as it is when this object is built: do not change it afterwards. It covers no
    environment variables, and draws from other sources than the global generators are not noticed: put them into
    ``live``.

    Args:
        dataset: the data set, without random transforms of its own.
        cached: deterministic transform of what is stored, such as ``Resize(256)``; None: samples as they are.
        live: transform that runs each time, such as ``RandomResizedCrop(224)``; None: none.
        dir: directory on a local disk, to hold the caches of any number of data sets. It is made if it is missing. Each
            cache is a directory in it that belongs to this user alone.
        max_gb: most that the stored samples may take, in 10^9 bytes. Once it is reached no more are stored and none is
            dropped: an epoch needs each sample once, so none is worth more than another. None: no limit but the disk.
        version: a text that stands for ``dataset`` and ``cached``, instead of a digest of their settings, their code
            and the files they name. Give another one whenever the samples change, and to each data set of a class.

    Raises:
        TypeError: if ``dataset`` has no length or no items by number.
        ValueError: if there is no digest of the data set or of ``cached``, and no ``version``; for a wrong ``max_gb``.

    Example::

        images = ImageFolder("/nfs/imagenet/train")
        train = dx.data.CachedDataset(
            images, cached=Resize(256), live=Compose([RandomCrop(224), ToTensor()]), dir="/scratch/cache"
        )
        loader = DataLoader(train, batch_size=64, sampler=DistributedSampler(train), num_workers=4)
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        cached: Transform | None = None,
        live: Transform | None = None,
        dir: str | os.PathLike[str],
        max_gb: float | None = None,
        version: str | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise TypeError(
                f"dataset={type(dataset).__name__}: give a map-style data set, with __len__ and __getitem__"
            )
        if max_gb is not None and not max_gb > 0:
            raise ValueError(f"max_gb={max_gb!r}: give a number of gigabytes above 0, or None for no limit")
        self.dataset = dataset
        self._cached, self._live = cached, live
        self._length = len(dataset)
        key = _key(dataset, cached, version, self._length)
        self._store: SampleStore | None = None
        limit_bytes = float("inf") if max_gb is None else max_gb * 1e9
        directory = Path(dir).expanduser().absolute() / key
        try:
            self._store = SampleStore(directory, self._length, limit_bytes)
            write_about(directory, dataset, cached, self._length)
        except StoreRefused as error:
            self._do_without(error)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        number = range(self._length)[operator.index(index)]
        return _transformed(self._live, self._sample(number))

    def _sample(self, number: int) -> Any:
        if self._store is None:
            return self._storable(number)[0]
        try:
            found = self._store.find(number)
            if found.data is not None:
                return decode(found.data)
            sample, data = self._storable(number)
            if isinstance(data, bytes):
                self._store.add(number, data, found)
            else:
                self._store.say_once(Notice.NOT_STORABLE, f"sample {number} is made each time: {data}")
        except StoreRefused as error:  # in a new process the directory may be another one
            self._do_without(error)
            return self._storable(number)[0]
        return sample

    def _storable(self, number: int) -> tuple[Any, bytes | str]:
        """A new sample, as it will be read again, and its bytes; or the reason why it cannot be stored."""
        before = _random_states()
        sample = _transformed(self._cached, self.dataset[number])
        if _random_states() != before:
            return sample, "dataset or cached= draws random numbers. Random transforms belong in live="
        try:
            data = encode(sample)
        except NotStorable as error:
            return sample, f"it holds {error}"
        except (RuntimeError, ValueError, TypeError) as error:
            return sample, f"it cannot be stored: {error}"
        return decode(bytearray(data)), data

    def _do_without(self, error: StoreRefused) -> None:
        self._store = None
        if os.environ.get("LOCAL_RANK", "0") == "0":
            say(f"no data cache, so samples are made each time: {error}", logging.WARNING)


def _random_states() -> tuple[Any, ...]:
    """The states of Python's, NumPy's and torch's global generators, in values that can be compared."""
    numpy = _without_arrays(np.random.get_state(legacy=False))
    return random.getstate(), numpy, torch.get_rng_state().numpy().tobytes()


def _without_arrays(state: Any) -> Any:
    """The state of any bit generator that the user may have set."""
    if isinstance(state, dict):
        return {name: _without_arrays(one) for name, one in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _transformed(transform: Transform | None, sample: Any) -> Any:
    if transform is None:
        return sample
    if type(sample) in (tuple, list) and sample:
        return type(sample)([transform(sample[0]), *sample[1:]])
    return transform(sample)


def _key(dataset: Any, cached: Transform | None, version: str | None, length: int) -> str:
    """Name of the cache of these samples."""
    common = [FORMAT_VERSION, length, decoder_versions(), str(torch.get_default_dtype())]
    if version is not None:
        kinds = [f"{type(one).__module__}.{type(one).__qualname__}" for one in (dataset, cached)]
        return fingerprint(common, "version", version, kinds)
    parts = []
    for name, value in (("dataset", dataset), ("cached", cached)):
        try:
            parts.append(fingerprint(value))
        except (NoFingerprint, RuntimeError, ValueError, TypeError) as error:
            raise ValueError(
                f"{name}= holds {error}, so it cannot be told when its samples change: give version=, a text that you "
                "change whenever they do"
            ) from error
    return fingerprint(common, parts)
