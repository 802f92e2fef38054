"""``dx.relaxed``: training with less synchronization than DDP's."""

from ddp_crossover.addons.osp import OSP
from ddp_crossover.addons.relaxed import DiLoCo, LocalSGD, RelaxedState
from ddp_crossover.addons.selsync import SelSync

__all__ = ["OSP", "DiLoCo", "LocalSGD", "RelaxedState", "SelSync"]
