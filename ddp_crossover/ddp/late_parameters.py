"""Tells which parameters a module got only after DDP was built around it."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.log import first_of
from ddp_crossover.torch_internals.ddp import managed_parameters, parameters_as_built


def why_late(ddp: DistributedDataParallel) -> str | None:
    """What is wrong with parameters that are not those that DDP has broadcast and reduces; None if all are."""
    known = {id(parameter) for parameter in parameters_as_built(ddp)}
    late = [name for name, parameter in managed_parameters(ddp) if id(parameter) not in known]
    if not late:
        return None
    return (
        f"{first_of(late)} came into the model (moved, cast or replaced) after DistributedDataParallel was built, so "
        "plain DDP does not reduce their gradients, and has not given all ranks the same values. Build "
        "DistributedDataParallel after such changes"
    )
