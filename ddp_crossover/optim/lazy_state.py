"""The state of an optimizer with deferred updates: reading or changing it applies pending updates first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class LazyState(defaultdict[Any, Any]):
    """``optimizer.state`` while its optimizer is attached.

    Attributes:
        before_look: applies pending updates; None while the optimizer itself steps.
    """

    before_look: Callable[[], None] | None = None

    def __reduce__(self) -> Any:
        if self.before_look is not None:
            self.before_look()
        return defaultdict, (self.default_factory, dict(self))


def _after_updates(name: str) -> Any:
    original = getattr(defaultdict, name)

    def method(self: LazyState, *args: Any, **kwargs: Any) -> Any:
        if self.before_look is not None:
            self.before_look()
        return original(self, *args, **kwargs)

    return method


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__iter__", "__len__", "__repr__", "__setitem__"),
    *("clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(LazyState, _name, _after_updates(_name))


def make_state_lazy(optimizer: Optimizer) -> LazyState:
    """Make the optimizer's state lazy and return it. Needed at each step: ``load_state_dict`` and users replace it."""
    if not isinstance(optimizer.state, LazyState):
        optimizer.state = LazyState(getattr(optimizer.state, "default_factory", dict), optimizer.state)
    optimizer.state.before_look = None
    return optimizer.state


def make_state_plain(optimizer: Optimizer) -> None:
    """Replace a lazy state of the optimizer by an ordinary ``defaultdict``."""
    state = getattr(optimizer, "state", None)  # a class that skips ``Optimizer.__init__`` may have none
    if isinstance(state, LazyState):
        optimizer.state = defaultdict(state.default_factory, state)
