"""DDP communication hooks that overlap the all-reduce of gradients with backward and the next forward.

Example::

    import ddp_crossover as dx

    state = dx.attach(ddp, optimizer)   # after building both; the training loop does not change
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_crossover import data as data
    from ddp_crossover import integrations as integrations
    from ddp_crossover import optim as optim
    from ddp_crossover import relaxed as relaxed
    from ddp_crossover.addons.ddp_timer import DdpTimer
    from ddp_crossover.addons.ema import Ema
    from ddp_crossover.addons.launch.auto import auto
    from ddp_crossover.addons.lease.client import GpuLease
    from ddp_crossover.addons.norms.grad_scaler import GradScaler
    from ddp_crossover.addons.weights.sampler import BalancedSampler
    from ddp_crossover.attaching import attach
    from ddp_crossover.comm.agreement import DisagreementError
    from ddp_crossover.comm.leg import LegError
    from ddp_crossover.comm_hook import DearState, dear_hook
    from ddp_crossover.fusion import FusionPlan
    from ddp_crossover.options import Options
    from ddp_crossover.pending.lazy_param import StaleParameterError
    from ddp_crossover.report.stats import DearStats, LeaseUse, StepStats
    from ddp_crossover.report.trace import Trace
    from ddp_crossover.top_k import TopK

# Spelled here, so that a checkout that is not installed has it, too.
__version__ = "0.1.0"

# Imported when they are first used: the commands that ask a broker must not wait for torch.
_MODULES = {
    "BalancedSampler": "addons.weights.sampler",
    "DdpTimer": "addons.ddp_timer",
    "DearState": "comm_hook",
    "DearStats": "report.stats",
    "DisagreementError": "comm.agreement",
    "Ema": "addons.ema",
    "FusionPlan": "fusion",
    "GpuLease": "addons.lease.client",
    "GradScaler": "addons.norms.grad_scaler",
    "LeaseUse": "report.stats",
    "LegError": "comm.leg",
    "Options": "options",
    "StaleParameterError": "pending.lazy_param",
    "StepStats": "report.stats",
    "TopK": "top_k",
    "Trace": "report.trace",
    "attach": "attaching",
    "auto": "addons.launch.auto",
    "dear_hook": "comm_hook",
}

__all__ = [
    "BalancedSampler",
    "DdpTimer",
    "DearState",
    "DearStats",
    "DisagreementError",
    "Ema",
    "FusionPlan",
    "GpuLease",
    "GradScaler",
    "LeaseUse",
    "LegError",
    "Options",
    "StaleParameterError",
    "StepStats",
    "TopK",
    "Trace",
    "attach",
    "auto",
    "dear_hook",
]


def __getattr__(name: str) -> object:
    if name in ("data", "integrations", "optim", "relaxed"):
        value: object = import_module(f"{__name__}.{name}")
    elif name in _MODULES:
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # asked for once only
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
