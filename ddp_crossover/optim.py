"""``dx.optim``: optimizers of this package."""

from ddp_crossover.addons.optimizers import LAMB, LARS, LayerSumOptimizer

__all__ = ["LAMB", "LARS", "LayerSumOptimizer"]
