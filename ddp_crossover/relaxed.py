"""``dx.relaxed``: training with less synchronization than DDP's."""

from ddp_crossover.addons.relaxed import DiLoCo, LocalSGD, RelaxedState

__all__ = ["DiLoCo", "LocalSGD", "RelaxedState"]
