"""What frameworks hand out instead of a DDP object and an optimizer, and what is inside of it.

Known by the names of their classes, so that no framework is imported. A wrapper that is not in the table may do more
than to pass calls on (Lookahead, SAM), so what is inside of it is not for us to take. What nobody hands over is looked
for among all objects of this process.
"""

from __future__ import annotations

import gc
from typing import TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.hook.refusals import refuse_other_parallelism

T = TypeVar("T")


def live_objects(kind: type[T]) -> list[T]:
    """Return all objects of a class, or of one that is derived from it, that something still refers to."""
    gc.collect()  # or what has been dropped would be found
    # Not isinstance: it asks proxies for their class.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


# Class -> the attribute that holds what it wraps. Their step() ends in step() of the optimizer inside, and their
# forward in forward of the DDP object inside, so hooks on these see all that happens.
_OPTIMIZER_INSIDE = {
    "AcceleratedOptimizer": "optimizer",  # Accelerate, and Hugging Face's Trainer
    "LightningOptimizer": "optimizer",
    "_FabricOptimizer": "optimizer",
}
_MODEL_INSIDE = {
    "OptimizedModule": "_orig_mod",  # torch.compile(ddp)
    "_FabricModule": "_forward_module",
}


def unwrapped_optimizer(obj: object) -> Optimizer:
    """Return the torch optimizer whose ``step()`` updates the parameters.

    Args:
        obj: an optimizer, or one as Accelerate, Hugging Face's Trainer, Lightning or Fabric wraps it.

    Raises:
        TypeError: if it is neither; the message says what to pass instead.
    """
    inside = _inside(obj, _OPTIMIZER_INSIDE)
    if isinstance(inside, Optimizer):
        return inside
    held = getattr(inside, "optimizer", None)
    if isinstance(held, Optimizer):
        advice = f"pass its .optimizer, a {type(held).__name__}"
    else:
        advice = "pass the optimizer that it wraps, whose step() updates the parameters"
    raise TypeError(f"optimizer is a {type(obj).__name__}, not a torch.optim.Optimizer: {advice}")


def unwrapped_model(obj: object) -> DistributedDataParallel:
    """Return the DDP object in which a model is wrapped.

    Args:
        obj: a DDP object, or one inside of ``torch.compile`` or Fabric's wrapper, or a ``LightningModule`` that a
            Trainer has wrapped.

    Raises:
        TypeError: if there is none; the message says what to pass instead.
    """
    inside = _inside(obj, _MODEL_INSIDE)
    if _is_a(inside, "LightningModule"):
        strategy = getattr(getattr(inside, "_trainer", None), "strategy", None)
        inside = _inside(getattr(strategy, "model", None) or inside, _MODEL_INSIDE)
    if isinstance(inside, DistributedDataParallel):
        return inside
    refuse_other_parallelism(inside)
    raise TypeError(
        f"attach needs a DistributedDataParallel model, got {type(obj).__name__}: {_instead_of_model(inside)}"
    )


def _instead_of_model(obj: object) -> str:
    if _is_a(obj, "LightningModule"):
        return (
            "Lightning wraps it when fit() begins, with strategy='ddp': use "
            "Trainer(callbacks=[ddp_crossover.integrations.lightning.DearCallback()])"
        )
    if hasattr(obj, "model_wrapped"):
        return (
            "the Trainer wraps its model when train() begins: use "
            "Trainer(callbacks=[ddp_crossover.integrations.transformers.DearCallback()])"
        )
    if isinstance(obj, nn.Module):
        for name, module in obj.named_modules():
            if isinstance(module, DistributedDataParallel):
                return f"pass its .{name}, which is one"
    return "wrap the model first, and pass the DDP object itself rather than ddp.module"


def _inside(obj: object, table: dict[str, str]) -> object:
    """Take off every wrapper that the table names."""
    while True:
        attributes = [table[cls.__name__] for cls in type(obj).__mro__ if cls.__name__ in table]
        if not attributes:
            return obj
        obj = getattr(obj, attributes[0])


def _is_a(obj: object, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(obj).__mro__)
