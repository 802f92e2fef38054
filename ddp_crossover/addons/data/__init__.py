"""Data sets whose decoded samples stay on local disk: ``dx.data.CachedDataset``.

Imports of this package go down: the data set knows the store of samples, their form as bytes and the digest that names
a cache; none of these knows another. The store and the command load no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_crossover.addons.data.cached_dataset import CachedDataset as CachedDataset

__all__ = ["CachedDataset"]


def __getattr__(name: str) -> object:
    if name == "CachedDataset":
        return import_module(f"{__name__}.cached_dataset").CachedDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
