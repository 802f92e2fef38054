"""The hooks of an optimizer, and its ``step`` without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddp_crossover.torch_internals.private import private

# Attributes in which an optimizer keeps the hooks around its `step()`.
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_LOAD_HOOKS = "_optimizer_load_state_dict_pre_hooks"

# What `attributes_of` leaves out: a learning-rate scheduler wraps `step` on the instance, to count the calls, a lazy
# state sets `__getstate__`, and torch's fused optimizers note in the last one that they have checked the devices.
NO_SETTINGS = ("param_groups", "state", "step", "__getstate__", "_need_device_dtype_check_for_fused")


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Its attributes beside its param groups and its state."""
    return {name: value for name, value in vars(optimizer).items() if name not in NO_SETTINGS}


def was_any_built() -> bool:
    """Whether an optimizer was built in this process: the first of each class wraps the class's ``step``."""
    classes = [Optimizer]
    for each in classes:
        classes += each.__subclasses__()
    return any(getattr(each.step, "hooked", False) for each in classes)


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether the optimizer takes hooks; one whose class skips ``Optimizer.__init__`` does not."""
    # Not by `hasattr`: some wrappers forward unknown attributes to the optimizer that they hold.
    return all(name in vars(optimizer) for name in (*STEP_HOOKS, _LOAD_HOOKS))


def require_hooks(optimizers: Iterable[Optimizer], who: str, and_so: str) -> None:
    """Raise TypeError unless all of these optimizers take hooks.

    Args:
        optimizers: the optimizers.
        who: begins the message: what needs to follow their steps.
        and_so: ends it: what follows from that, and the way out.
    """
    for optimizer in optimizers:
        if not has_hooks(optimizer):
            raise TypeError(
                f"{who} cannot follow {type(optimizer).__name__}, whose class skips Optimizer.__init__ and takes no "
                f"hooks{and_so}"
            )


def raw_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the unbound ``step`` of the optimizer's class, without hooks, profiler range or scheduler counters."""
    return private(type(optimizer).step, "__wrapped__")  # type: ignore[no-any-return]


def has_raw_step(optimizer: Optimizer) -> bool:
    """Whether :func:`raw_step` is available and ``step`` was not replaced on the instance."""
    step = vars(optimizer).get("step")
    # A learning-rate scheduler also wraps `step` on the instance, but only to count calls.
    replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    return hasattr(type(optimizer).step, "__wrapped__") and not replaced


def move_to_front(hooks_of: Optimizer, handle: RemovableHandle) -> None:
    """Make a step post-hook run first, so that users' post-hooks see gradients in place."""
    private(hooks_of, "_optimizer_step_post_hooks").move_to_end(handle.id, last=False)


def move_to_back(hooks_of: Optimizer, hook: Callable[..., Any]) -> None:
    """Make a step pre-hook run last, so that it sees what the others have done."""
    hooks = private(hooks_of, "_optimizer_step_pre_hooks")
    for key in [key for key, each in hooks.items() if each == hook]:
        hooks.move_to_end(key)


def step_pre_hooks(optimizer: Optimizer) -> list[Any]:
    """Return the step pre-hooks of an optimizer, in the order in which they run; none if it takes none."""
    return list(private(optimizer, "_optimizer_step_pre_hooks").values()) if has_hooks(optimizer) else []
