"""What is known of the optimizers of a model, under the settings that they have, and what must be watched first.

A judgement holds for the settings under which it was made: all that ``step()`` can read, numbers by how it compares
them. It begins with a trial on a clone. Then the first two updates of each parameter are watched, because the first one
makes its state; nothing of an optimizer is deferred in a step that is watched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.torch_internals.optimizers import attributes_of, has_hooks
from ddp_crossover.watching.noted_numbers import Comparisons
from ddp_crossover.watching.optimizer_snapshot import optimizer_parameters
from ddp_crossover.watching.separability import Verdict, is_tested, judge
from ddp_crossover.watching.step_watch import Seen
from ddp_crossover.watching.values import entries_of

_WATCHED_UPDATES = 2
# A step that is watched defers nothing, so an optimizer whose settings change all the time would never overlap.
_MOST_SETTINGS = 32
_TOO_MANY = f"it has had {_MOST_SETTINGS} different settings, and what it does with a new one must be watched first"


class KnownOptimizers:
    """The optimizers of one model.

    Args:
        optimizers: the optimizers.
        name_of: what parameters are called.
    """

    def __init__(self, optimizers: Sequence[Optimizer], name_of: Callable[[Tensor], str]) -> None:
        self._known = {optimizer: _Known(optimizer) for optimizer in optimizers}
        self._name_of = name_of
        _of_models.add(self)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._known)

    def __contains__(self, optimizer: object) -> bool:
        return optimizer in self._known

    def why_not(self, optimizer: Optimizer) -> str | None:
        """Why its updates must not be deferred, by what is known so far; None if they may be."""
        return self._known[optimizer].verdict.why_not

    def verdict(self, optimizer: Optimizer) -> Verdict:
        """What is known so far."""
        return self._known[optimizer].verdict

    def settings(self, optimizer: Optimizer) -> Hashable:
        """The settings that it had when it was last looked at, numbers by how its step compares them."""
        return self._known[optimizer].settings

    def wrapper_of(self, optimizer: Optimizer) -> Optimizer | None:
        """The one of them that has this optimizer in an attribute, or None."""
        return next((each for each in self if any(value is optimizer for value in vars(each).values())), None)

    def look_again(self, optimizer: Optimizer) -> None:
        """Judge it again if its settings have changed."""
        self._known[optimizer].look_again(optimizer)

    def is_to_be_watched(self, optimizer: Optimizer) -> bool:
        """Whether its updates may be deferred as far as is known, but those of some parameters were not watched."""
        known = self._known[optimizer]
        is_known = known.verdict.why_not is not None or is_tested(optimizer)
        return not is_known and not known.has_watched(optimizer_parameters(optimizer))

    def learn(self, optimizer: Optimizer, see: Callable[..., Seen]) -> None:
        """Take in what a step has done that was watched."""
        known = self._known[optimizer]
        known.learn(see(known.verdict.counters, self._name_of), optimizer_parameters(optimizer))

    def drop_references(self) -> None:
        self._known.clear()


_of_models: weakref.WeakSet[KnownOptimizers] = weakref.WeakSet()


def attached_optimizers() -> list[Optimizer]:
    """Those of all models of this process, each once."""
    return list(dict.fromkeys(optimizer for known in list(_of_models) for optimizer in known))


class _Known:
    """What is known of one optimizer.

    Attributes:
        verdict: under the settings that it had last.
        settings: those settings, numbers by how its step compares them, and the code that goes by them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.verdict = judge(optimizer)
        self._has_changed_outside = False
        self._look_at(optimizer)
        # By settings: what is known, and how often each parameter was watched.
        self._counts: dict[int, int] = {}
        self._of_settings = {self.settings: (self.verdict, self._counts)}

    def look_again(self, optimizer: Optimizer) -> None:
        if self._has_changed_outside or not has_hooks(optimizer):
            return
        if (what := self.verdict.outside.values.changed()) is not None:
            self._has_changed_outside = True  # it may do so again, and after a step()
            self.verdict = self.verdict._replace(
                why_not=f"its step() reads {what}, which has changed. Pass it in a param group"
            )
            return
        if not self._looks_changed(optimizer):
            return
        self._look_at(optimizer)
        if self.settings not in self._of_settings:
            if len(self._of_settings) == _MOST_SETTINGS:
                self.verdict = self.verdict._replace(why_not=_TOO_MANY)
                return
            self.verdict = judge(optimizer)
            self._look_at(optimizer)
        self.verdict, self._counts = self._of_settings.setdefault(self.settings, (self.verdict, {}))

    def _look_at(self, optimizer: Optimizer) -> None:
        self._looks = [
            {name: _Look(value, self._kind(name, value)) for name, value in self._readable(each)}
            for each in _all_settings(optimizer)
        ]
        self._code = _code_of(optimizer)
        kinds = tuple(tuple((name, look.kind) for name, look in each.items()) for each in self._looks)
        self.settings = (self._code, kinds)

    def _looks_changed(self, optimizer: Optimizer) -> bool:
        """Whether to look at all settings: called in each step, so it compares those that are other objects only."""
        settings = _all_settings(optimizer)
        if len(settings) != len(self._looks) or self._code != _code_of(optimizer):
            return True
        for looks, each in zip(self._looks, settings, strict=True):
            count = 0
            for name, value in self._readable(each):
                count += 1
                look = looks.get(name)
                if look is None:
                    return True
                if value is look.value and type(value) in _FIXED:
                    continue
                if self._kind(name, value) != look.kind:
                    return True
            if count != len(looks):
                return True
        return False

    def _readable(self, settings: dict[str, Any]) -> list[tuple[str, Any]]:
        """All but what its step changes itself, and what is no setting."""
        counters, constants = self.verdict.counters, self.verdict.constants
        readable = [
            (name, value)
            for name, value in settings.items()
            if name not in _NOT_READ and name not in counters and not name.startswith("._optimizer_")
        ]
        changed = [(name, settings[name]) for name in counters if name in settings] if constants else []
        return readable + [
            entry for name, value in changed for entry in entries_of(name, value).items() if entry[0] in constants
        ]

    def _kind(self, name: str, value: Any) -> Hashable:
        if name == ".defaults" and isinstance(value, dict):  # they may be the same lists as settings
            value = {key: each for key, each in value.items() if key not in self.verdict.counters}
        return (self.verdict.comparisons or _NO_COMPARISONS).kind(name, value)

    def has_watched(self, parameters: Iterable[Tensor]) -> bool:
        counts = self._counts
        return all(counts.get(id(p), 0) >= _WATCHED_UPDATES or p.grad is None for p in parameters)

    def learn(self, seen: Seen, parameters: Iterable[Tensor]) -> None:
        counts = self._counts
        for parameter in parameters:
            if parameter.grad is not None:
                key = id(parameter)
                if key not in counts:
                    weakref.finalize(parameter, counts.pop, key, None).atexit = False  # another one may get its id
                counts[key] = counts.get(key, 0) + 1
        edits_gradients = self.verdict.edits_gradients or seen.edits_gradients
        self.verdict = self.verdict._replace(why_not=seen.why_not, edits_gradients=edits_gradients)
        self._of_settings[self.settings] = (self.verdict, counts)


def _code_of(optimizer: Optimizer) -> tuple[Any, ...]:
    """Its class and its ``step()``, either of which a script may replace."""
    return type(optimizer), type(optimizer).step


class _Look(NamedTuple):
    value: Any
    kind: Hashable


# A learning-rate scheduler sets `_opt_called`, and a GradScaler the last two.
_NOT_READ = frozenset(("params", "param_names", "_opt_called", "grad_scale", "found_inf"))
_FIXED = frozenset((type(None), bool, int, float, str))
_NO_COMPARISONS = Comparisons()


def _all_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """All that a step can read beside parameters, gradients and state, for each param group and for the optimizer."""
    attributes = {f".{name}": value for name, value in attributes_of(optimizer).items() if name not in _NOT_READ}
    return [*optimizer.param_groups, attributes]
