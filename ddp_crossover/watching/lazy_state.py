"""The state of an optimizer with deferred updates: reading or changing it applies pending updates first.

One optimizer may train several attached models; each has pending updates of its own.

An optimizer makes the entry of a parameter in its first update. First updates that are deferred make entries in the
order in which forward uses parameters; plain steps, in that of the param groups, which scripts see and files keep.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from ddp_crossover.watching.optimizer_snapshot import optimizer_parameters


class LazyState(defaultdict[Any, Any]):
    """``optimizer.state`` while its optimizer is attached.

    Attributes:
        before_look: by the model, what applies its pending updates; None while the optimizer itself steps.
        optimizer: the optimizer.
        settled: how many entries, from the first one on, are in the order of plain steps.
        entries: what is known of all of them, see ``state_entries``; None if others may have changed some since.
        answers: how often that was asked for since the look from which it is known.
    """

    before_look: dict[object, Callable[[], None] | None]
    optimizer: weakref.ref[Optimizer]
    settled: int
    entries: Any
    answers: int

    def apply_pending(self) -> None:
        applies = list(self.before_look.values())
        for apply in applies:
            if apply is not None:
                apply()
        if None not in applies:
            self.entries = None
            self.settle()

    def of_copies(self) -> Any:
        """What a copy of the optimizer is made of: all as it is after pending updates.

        Torch takes the defaults before the state, and they may hold a table that updates write to.
        """
        optimizer = self.optimizer()
        assert optimizer is not None  # it calls this
        self.apply_pending()
        return type(optimizer).__getstate__(optimizer)

    def settle(self) -> None:
        """Put the entries that the last steps have made in the order of plain steps."""
        count, optimizer = dict.__len__(self), self.optimizer()
        if count > self.settled + 1 and optimizer is not None:
            for key in in_order_of_steps(optimizer, list(dict.keys(self))[self.settled :]):
                dict.__setitem__(self, key, dict.pop(self, key))
        self.settled = count

    def __reduce__(self) -> Any:
        return defaultdict, (self.default_factory, dict(self))

    def copy(self) -> Any:
        """A copy that is no longer the optimizer's, and so an ordinary ``defaultdict``."""
        return defaultdict(self.default_factory, self)

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()


def _after_updates(name: str) -> Any:
    original = getattr(defaultdict, name)

    def method(self: LazyState, *args: Any, **kwargs: Any) -> Any:
        self.apply_pending()
        return original(self, *args, **kwargs)

    return method


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__iter__", "__len__", "__repr__", "__setitem__"),
    *("clear", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(LazyState, _name, _after_updates(_name))


def in_order_of_steps(optimizer: Optimizer, keys: Iterable[Any]) -> list[Any]:
    """Keys of an optimizer's state in the order in which a plain step makes their entries."""
    places = {id(parameter): place for place, parameter in enumerate(optimizer_parameters(optimizer))}
    return sorted(keys, key=lambda key: places.get(id(key), len(places)))


# References to the state that nobody else has: of the optimizer, of the variable here, and of what counts them.
_OWN_REFERENCES = 3


def why_state_is_shared(optimizer: Optimizer) -> str | None:
    """Why its state cannot be replaced by a lazy one, because others refer to it, as wrappers do; None if it can."""
    state = vars(optimizer).get("state")
    if isinstance(state, LazyState) or sys.getrefcount(state) <= _OWN_REFERENCES:
        return None
    return (
        "something else refers to its state (a wrapper with the same .state, or a variable), and would see there what "
        "was before a deferred update. Read optimizer.state anew each time"
    )


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
        state.optimizer = weakref.ref(optimizer)
        dict.update(state, optimizer.state)
        state.settled = dict.__len__(state)
        state.entries, state.answers = None, 0
        optimizer.state = state
        vars(optimizer)["__getstate__"] = state.of_copies
    if before_look is None:
        optimizer.state.settle()
    optimizer.state.before_look[model] = before_look


def make_state_plain(optimizer: Optimizer, model: object) -> None:
    """Forget a model, and if no other one is left, replace the lazy state by an ordinary ``defaultdict``.

    Not if others refer to it, who would not see what the optimizer does to another one.
    """
    state = getattr(optimizer, "state", None)  # a class that skips ``Optimizer.__init__`` may have none
    if isinstance(state, LazyState):
        state.before_look.pop(model, None)
        if state.before_look:
            return
    # It refers to the lazy state, also to one that a checkpoint or a script has replaced.
    vars(optimizer).pop("__getstate__", None)
    if isinstance(state, LazyState) and sys.getrefcount(state) <= _OWN_REFERENCES:
        optimizer.state = defaultdict(state.default_factory, state)
