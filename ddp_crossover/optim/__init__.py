"""Optimizers: which updates can be deferred, and how deferred updates are applied."""

from ddp_crossover.optim.lamb import LAMB
from ddp_crossover.optim.lars import LARS
from ddp_crossover.optim.layer_sums import LayerSumOptimizer

__all__ = ["LAMB", "LARS", "LayerSumOptimizer"]
