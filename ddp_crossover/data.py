"""``dx.data``: data sets whose decoded samples stay on local disk."""

from ddp_crossover.addons.data.cached_dataset import CachedDataset

__all__ = ["CachedDataset"]
