"""What all ranks must have in common: the setup, checked at attach, and the plan, made by rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from ddp_crossover.agreement import all_gather_json, require_equal
from ddp_crossover.collectives import MAX_GROUPS, Link
from ddp_crossover.fusion import FusionPlan, GradientSpec, plan_fusion
from ddp_crossover.updates import hyperparameters
from ddp_crossover.wire import travels_as


def require_same_setup(
    link: Link,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    optimizers: Sequence[Optimizer],
    schedule: str,
    fusion_mb: float,
    wire_dtype: torch.dtype | None,
) -> None:
    """Raise :class:`DisagreementError` on every rank unless model, optimizers and options are the same on all."""
    name_of = {id(parameter): name for name, parameter in named}
    setup = {
        "options": {"schedule": schedule, "fusion_mb": fusion_mb, "wire_dtype": str(wire_dtype)},
        "parameters": {name: f"{tuple(parameter.shape)} {parameter.dtype}" for name, parameter in named},
        "optimizers": [
            {
                "type": type(optimizer).__name__,
                "param_groups": [
                    {
                        "params": [name_of.get(id(p), "not in the model") for p in group["params"]],
                        **{key: _comparable(value) for key, value in hyperparameters(group).items()},
                    }
                    for group in optimizer.param_groups
                ],
            }
            for optimizer in optimizers
        ],
    }
    require_equal("setup", setup, link.process_group, named[0][1].device)


def _comparable(value: object) -> object:
    """A hyperparameter as something that is equal on two ranks when it means the same."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    return type(value).__name__  # functions and objects differ in their address at least


def agree_on_plan(
    named: Sequence[tuple[str, torch.nn.Parameter]],
    arrival_order: list[int],
    use_rank: list[int],
    link: Link,
    fusion_mb: float,
    wire_dtype: torch.dtype | None,
) -> FusionPlan:
    """Rank 0's orders make the plan on every rank; then all compare what came out.

    Args:
        named: the parameters that DDP manages.
        arrival_order: parameter indices in the order in which this rank's gradients arrive.
        use_rank: per parameter, when this rank's forward first uses it.
        link: the ranks.
        fusion_mb: target size of a group on the wire in MiB.
        wire_dtype: what wider gradients are cast to; None if they travel as they are.

    Raises:
        DisagreementError: if gradients arrive in another order than on rank 0.
        ValueError: if the plan has more groups than messages can be told apart.
    """
    device = named[0][1].device
    proposals = all_gather_json({"arrival": arrival_order, "use": use_rank}, link.process_group, device)
    plan = plan_fusion(
        [_spec(name, parameter, wire_dtype) for name, parameter in named],
        proposals[0]["arrival"],
        proposals[0]["use"],
        world_size=link.world_size,
        fusion_mb=fusion_mb,
    )
    if len(plan.groups) >= MAX_GROUPS:
        raise ValueError(
            f"fusion_mb={fusion_mb:g} makes {len(plan.groups)} fusion groups, more than {MAX_GROUPS - 1}: "
            "set a larger fusion_mb"
        )
    require_equal("fusion plan", {"arrival order": arrival_order, "digest": plan.digest()}, link.process_group, device)
    return plan


def _spec(name: str, parameter: torch.nn.Parameter, wire_dtype: torch.dtype | None) -> GradientSpec:
    dtype = travels_as(parameter.dtype, wire_dtype)
    as_what = "" if dtype is parameter.dtype else f" as {dtype}"
    arena = f"{parameter.dtype}{as_what} on {parameter.device.type}".replace("torch.", "")
    return GradientSpec(name, parameter.numel(), dtype.itemsize, arena)
