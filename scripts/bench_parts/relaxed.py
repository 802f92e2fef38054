"""Arms that share parameters every few steps, ours and torch's. A turn has to be a multiple of these steps."""

import re
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import ddp_crossover as dx
from bench_kit.training import Arm, Workload

PERIODS = (1, 8, 32)
_KINDS = {
    "local": "ddp_crossover, LocalSGD(every={n})",
    "local-late": "the same with delay=1: the mean travels under a step",
    "local-int8": "LocalSGD(every={n}) with 8-bit codes",
    "diloco": "ddp_crossover, DiLoCo(every={n})",
    "post-local": "torch's PostLocalSGDOptimizer with a period of {n}",
}
MEANING = {f"{kind}-{n}": text.format(n=n) for kind, text in _KINDS.items() for n in PERIODS}


def period(kind: str) -> int | None:
    """Steps between two means of an arm; None for one that is not relaxed."""
    found = re.fullmatch(r".*-(\d+)", kind)
    return int(found[1]) if kind in MEANING and found else None


class RelaxedArm(Arm):
    """An arm with a state of `dx.relaxed`, or torch's optimizer that averages models."""

    def __init__(
        self, workload: Workload, network: nn.Module, optimizer: Optimizer, relaxed: dx.relaxed.RelaxedState | None
    ) -> None:
        super().__init__(workload, network, optimizer)
        self._relaxed = relaxed

    def facts(self) -> dict[str, Any]:
        return {} if self._relaxed is None else {"divergence": self._relaxed.stats().divergence}

    def close(self) -> None:
        if self._relaxed is not None:
            self._relaxed.detach()


def make_relaxed_arm(kind: str, workload: Workload, ddp: DistributedDataParallel, optimizer: Optimizer) -> RelaxedArm:
    """Build an arm of `MEANING`. Collective."""
    every = period(kind)
    assert every is not None
    if kind.startswith("post-local"):
        state = post_localSGD_hook.PostLocalSGDState(
            None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False
        )
        ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=every, warmup_steps=0)
        return RelaxedArm(workload, ddp, PostLocalSGDOptimizer(optimizer, averager), None)
    policies = {
        "local": dx.relaxed.LocalSGD(every=every),
        "local-late": dx.relaxed.LocalSGD(every=every, delay=1),
        "local-int8": dx.relaxed.LocalSGD(every=every, wire_dtype=torch.int8),
        "diloco": dx.relaxed.DiLoCo(every=every),
    }
    return RelaxedArm(workload, ddp, optimizer, dx.attach(ddp, optimizer, sync=policies[kind.rpartition("-")[0]]))
