"""DDP communication hooks that overlap the all-reduce of gradients with backward and the next forward.

Example::

    import ddp_crossover as dx

    state = dx.attach(ddp, optimizer)   # after building both; the training loop does not change
"""

from ddp_crossover.collectives.agreement import DisagreementError
from ddp_crossover.collectives.leg import LegError
from ddp_crossover.comm_hook import DearState, attach, dear_hook
from ddp_crossover.ddp_timer import DdpTimer
from ddp_crossover.fusion import FusionPlan
from ddp_crossover.lease.client import GpuLease
from ddp_crossover.optim.grad_scaler import GradScaler
from ddp_crossover.parameters.lazy_params import StaleParameterError
from ddp_crossover.stats import DearStats, LeaseUse, StepStats
from ddp_crossover.tracing.trace import Trace

__all__ = [
    "DdpTimer",
    "DearState",
    "DearStats",
    "DisagreementError",
    "FusionPlan",
    "GpuLease",
    "GradScaler",
    "LeaseUse",
    "LegError",
    "StaleParameterError",
    "StepStats",
    "Trace",
    "attach",
    "dear_hook",
]
