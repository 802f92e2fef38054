"""Training with less synchronization than DDP's: ``dx.attach(ddp, optimizer, sync=dx.relaxed.LocalSGD(every=8))``.

This changes the algorithm, and so the result. docs/relaxed.md begins with when not to use it.
"""

from ddp_crossover.addons.relaxed.policies import DiLoCo, LocalSGD
from ddp_crossover.addons.relaxed.state import RelaxedState

__all__ = ["DiLoCo", "LocalSGD", "RelaxedState"]
