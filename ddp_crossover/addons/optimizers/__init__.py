"""LAMB and LARS, whose updates can be deferred and sharded."""

from ddp_crossover.addons.optimizers.lamb import LAMB
from ddp_crossover.addons.optimizers.lars import LARS
from ddp_crossover.addons.optimizers.layer_sums import LayerSumOptimizer

__all__ = ["LAMB", "LARS", "LayerSumOptimizer"]
