"""A state in a few lines, for ``print(state)``."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.figures.stats import DearStats
from ddp_crossover.fusion import MB, FusionPlan
from ddp_crossover.log import short
from ddp_crossover.torch_internals.ddp import managed_parameters


def about(ddp: DistributedDataParallel, rank: int) -> str:
    """Return model, size of its gradients (in the parameters' dtype), backend and rank in one line."""
    parameters = [parameter for _, parameter in managed_parameters(ddp)]
    gradients_mb = sum(parameter.nbytes for parameter in parameters) / MB
    backend = dist.get_backend(ddp.process_group)
    return (
        f"{type(ddp.module).__name__}, {len(parameters)} gradients, {short(gradients_mb)} MiB; "
        f"rank {rank} of {ddp.process_group.size()} over {backend}"
    )


def in_force(plan: FusionPlan | None) -> str:
    """Return how gradients travel under this plan, as a title."""
    return "plain all-reduces" if plan is None else f"schedule {plan.schedule}, groups of up to {plan.largest_group()}"


def summary(about_model: str, plan: FusionPlan | None, tuning: str, stats: DearStats, *, is_detached: bool) -> str:
    """Return what is in force, how far tuning has come, and the figures of the latest step that is like the next."""
    lines = [f"DearState of {about_model}"]
    if not is_detached:
        lines += (in_force(plan) if plan is None else repr(plan)).splitlines()
    lines.append(tuning)
    if stats.iterations == 0:
        return "\n  ".join(lines)
    if (last := stats.last_step) is not None and not is_detached:
        lines.append(f"last step {short(1e3 * last.duration_s)} ms, {_exposed(last.exposed_s)}")
    lines += str(stats).splitlines()
    return "\n  ".join(lines)


def _exposed(exposed_s: float) -> str:
    if math.isnan(exposed_s):
        return "exposed communication not measured"
    return f"{short(1e3 * exposed_s)} ms of it exposed"
