"""The state of an optimizer with deferred updates: reading or changing it applies pending updates first.

One optimizer may train several attached models; each has pending updates of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class LazyState(defaultdict[Any, Any]):
    """``optimizer.state`` while its optimizer is attached.

    Attributes:
        before_look: by the model, what applies its pending updates; None while the optimizer itself steps.
    """

    before_look: dict[object, Callable[[], None] | None]

    def apply_pending(self) -> None:
        """Apply the pending updates of all models."""
        for apply in list(self.before_look.values()):
            if apply is not None:
                apply()

    def __reduce__(self) -> Any:
        self.apply_pending()
        return defaultdict, (self.default_factory, dict(self))


def _after_updates(name: str) -> Any:
    original = getattr(defaultdict, name)

    def method(self: LazyState, *args: Any, **kwargs: Any) -> Any:
        self.apply_pending()
        return original(self, *args, **kwargs)

    return method


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__iter__", "__len__", "__repr__", "__setitem__"),
    *("clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(LazyState, _name, _after_updates(_name))


def make_state_lazy(optimizer: Optimizer, model: object, before_look: Callable[[], None] | None = None) -> None:
    """Apply the pending updates of one model before others look at the optimizer's state.

    Needed at each step: ``load_state_dict`` and users replace the state.

    Args:
        optimizer: the optimizer.
        model: identifies the model.
        before_look: applies its pending updates; None while the optimizer steps, which may look at its own state.
    """
    if not isinstance(optimizer.state, LazyState):
        state = LazyState(getattr(optimizer.state, "default_factory", dict))
        state.before_look = {}
        dict.update(state, optimizer.state)
        optimizer.state = state
    optimizer.state.before_look[model] = before_look


def make_state_plain(optimizer: Optimizer, model: object) -> None:
    """Forget a model, and if no other one is left, replace the lazy state by an ordinary ``defaultdict``."""
    state = getattr(optimizer, "state", None)  # a class that skips ``Optimizer.__init__`` may have none
    if isinstance(state, LazyState):
        state.before_look.pop(model, None)
        if not state.before_look:
            optimizer.state = defaultdict(state.default_factory, state)
