"""Judges by its class, its settings and a trial on a small clone whether an optimizer's step may be split.

Updates may be deferred per fusion group only if stepping some parameters now and others later gives the same bits as
stepping all at once, and if a step without gradients changes nothing. What an optimizer does to real parameters is
watched in real steps, see ``watching``. A trial finds what only a split step shows, as that a parameter's place in the
list matters, before training begins, and what happens every few steps.

A trial takes some 20 ms. Answers about torch's own optimizers depend on the class, the settings of param groups and the
kinds of parameters, and are remembered, because a process may attach many models, or one model again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Hashable, Iterator, Set
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.torch_internals.dispatch import default_device
from ddp_crossover.torch_internals.optimizers import raw_step
from ddp_crossover.watching.at_sight import why_not_at_sight
from ddp_crossover.watching.caches import why_found_twice
from ddp_crossover.watching.clone import Clone
from ddp_crossover.watching.foreach import is_alike_with_foreach, may_use_foreach
from ddp_crossover.watching.noted_numbers import Comparisons
from ddp_crossover.watching.optimizer_snapshot import (
    dotted_attributes,
    hyperparameters,
    is_of_torch,
    optimizer_parameters,
    shared_state,
)
from ddp_crossover.watching.outside_settings import Outside, outside
from ddp_crossover.watching.step_watch import Communicates, StepWatch
from ddp_crossover.watching.update_writes import DifferentWrites
from ddp_crossover.watching.values import entries_of, same

T = TypeVar("T")
_MOST_ANSWERS = 256
_answers: dict[Hashable, Any] = {}

Question = Callable[[Optimizer, bool], T]
"""A trial on an optimizer, with the state that it has if the second argument says so."""


def ask(question: Question[T], optimizer: Optimizer, failed: Callable[[Exception], T]) -> T:
    """Return the answer to ``question``, or ``failed`` of the error that the trial raised without state and with it.

    Leaves the global random states of torch, NumPy and Python as they were.
    """
    kind = (question, *_kind(optimizer)) if is_of_torch(optimizer) else None
    if kind in _answers:
        known: T = _answers[kind]
        return known
    # Empty state first. Some optimizers (Adagrad up to torch 2.11) create state in `__init__`, and fail without it.
    try:
        with _trial_of(optimizer):
            answer = question(optimizer, False)
    except Exception:
        try:
            with _trial_of(optimizer):
                return question(optimizer, True)
        except Exception as error:
            return failed(error)
    if kind is not None:
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        _answers[kind] = answer
    return answer


def _kind(optimizer: Optimizer) -> tuple[Any, ...]:
    groups = []
    for group in optimizer.param_groups:
        settings = hyperparameters(group)
        settings.pop("lr", None)  # schedulers move it, and no formula changes with it
        kinds = sorted({(p.dim(), str(p.dtype), str(p.device)) for p in group["params"]})
        groups.append((repr(sorted(settings.items())), tuple(kinds)))
    return (type(optimizer), raw_step(optimizer), tuple(groups))


@contextmanager
def _trial_of(optimizer: Optimizer) -> Iterator[None]:
    """Context of a trial. What the optimizer makes in it has values, also where the default device has none."""
    has_values = nullcontext() if default_device().type != "meta" else torch.device("cpu")
    with _random_states_kept(optimizer), has_values:
        yield


@contextmanager
def _random_states_kept(optimizer: Optimizer) -> Iterator[None]:
    devices = {p.device for p in optimizer_parameters(optimizer) if p.device.type == "cuda"}
    of_python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class Verdict(NamedTuple):
    """What is known of an optimizer with the settings that it has.

    Attributes:
        why_not: why its updates must not be deferred; None if they may be.
        edits_gradients: whether its step writes to gradients.
        calls_closure: whether its step calls its closure exactly once, and does not go by what that returns.
        counters: what its step changes that belongs to no parameter, see :func:`_shared`.
        constants: what it leaves as it is in dicts and plain objects among these.
        comparisons: how its step compares settings.
        outside: what its code refers to outside of the optimizer.
        foreach: whether many small parameters may be updated in one call, see ``foreach``.
    """

    why_not: str | None
    edits_gradients: bool = False
    calls_closure: bool = True
    counters: frozenset[str] = frozenset()
    constants: frozenset[str] = frozenset()
    comparisons: Comparisons | None = None
    outside: Outside = Outside()
    foreach: bool = False


# Enough steps for counters that act every few steps.
_STEPS = 12
_STEP_OF_ZEROS = 5


def why_not_separable(optimizer: Optimizer) -> str | None:
    """Why this optimizer's updates must not be deferred; None if they may be. See :func:`judge`."""
    return judge(optimizer).why_not


def judge(optimizer: Optimizer) -> Verdict:
    """Judge an optimizer.

    Steps a clone with a few tiny parameters. Does not change the optimizer, its parameters, or the global random states
    of torch, NumPy and Python. Never talks to other ranks.
    """
    found = outside(optimizer)
    reason = why_not_at_sight(optimizer, found)
    if reason is not None:
        return Verdict(reason)
    with found.values.shown(copies=True) as written:
        verdict = ask(
            _try,
            optimizer,
            lambda error: Verdict(
                str(error)
                if isinstance(error, (Communicates, DifferentWrites))
                else f"a trial step on a small clone of it failed ({type(error).__name__}: {error})"
            ),
        )
    if written and verdict.why_not is None:
        return Verdict(f"its step() changes {written[0]}, which belongs to no parameter")
    why_not = verdict.why_not or why_found_twice(optimizer, verdict.counters)
    is_open = why_not is None and may_use_foreach(optimizer)
    foreach = is_open and ask(is_alike_with_foreach, optimizer, lambda _: False)
    return verdict._replace(outside=found, why_not=why_not, foreach=foreach)


def is_tested(optimizer: Optimizer) -> bool:
    """Whether its class says that it updates each parameter by itself, as those of this package, which tests show."""
    return bool(vars(type(optimizer)).get("updates_each_by_itself", False))  # a subclass has to say so itself


def _try(optimizer: Optimizer, with_state: bool) -> Verdict:
    comparisons = Comparisons()
    whole = Clone(optimizer, with_state, comparisons=comparisons)
    split = Clone(optimizer, with_state, comparisons=Comparisons())  # which makes numbers of NumPy Python's
    before = _shared(whole.optimizer)
    edits_gradients = False
    for step in range(_STEPS):
        for clone in (whole, split):
            clone.set_gradients(step)
            _make_special(clone.parameters, step)
        gradients = [parameter.grad.clone() for parameter in whole.parameters if parameter.grad is not None]
        is_last = step == _STEPS - 1
        if is_last and (reason := _difference(whole, split)) is not None:
            return Verdict(reason)
        attributes = copy.deepcopy([vars(parameter) for parameter in whole.parameters])
        try:
            with (watch := StepWatch(whole.optimizer, may_communicate=False)), comparisons.listening():
                result = raw_step(whole.optimizer)(whole.optimizer)
        except Exception:
            if is_last:  # some cannot go on with infinities, and raise in a plain step, too
                break
            raise
        reason = watch.seen(_changed(before, whole.optimizer)).why_not
        if reason is not None and not is_tested(optimizer):
            return Verdict(reason)
        if not same([vars(parameter) for parameter in whole.parameters], attributes):
            return Verdict(
                "its step() sets attributes of the parameters, which may be read before a deferred update sets them"
            )
        with StepWatch(split.optimizer, may_communicate=False):  # so that neither runs compiled functions
            returned = split.step_one_by_one()
        if not same(returned, result):
            return Verdict("its step() returns something that depends on the parameters")
        edits_gradients |= not same([parameter.grad for parameter in whole.parameters], gradients)
        if is_last and (reason := _difference(whole, split)) is not None:
            return Verdict(reason)
    counters = _changed(before, whole.optimizer)
    calls_closure = _calls_closure(optimizer, with_state)
    return Verdict(
        None, edits_gradients, calls_closure, counters, _unchanged_in(before, whole.optimizer, counters), comparisons
    )


def _difference(whole: Clone, split: Clone) -> str | None:
    of_whole, of_split = whole.everything(), split.everything()
    others = [what for what in {**of_whole, **of_split} if not same(of_whole.get(what), of_split.get(what))]
    if not others:
        return None
    return (
        "it does not update each parameter independently (in a trial on a small clone, updating them one by one gave "
        f"other values of its {others[0]} than updating them all at once)"
    )


def _make_special(parameters: list[Tensor], step: int) -> None:
    """Let a gradient or two be zero, or infinite: some optimizers skip a parameter then, and must not skip others."""
    for parameter in parameters[: 1 if len(parameters) < 3 else 2]:  # two, because a step may count them
        assert parameter.grad is not None
        if step == _STEP_OF_ZEROS:
            parameter.grad.zero_()
        elif step == _STEPS - 1:
            parameter.grad.view(-1)[-1:] = float("inf")


def _shared(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copies of what belongs to no parameter: settings of param groups, ``.attributes``, ``[keys of the state]``."""
    others = {**dotted_attributes(optimizer), **{f"[{key!r}]": value for key, value in shared_state(optimizer).items()}}
    return [*map(hyperparameters, optimizer.param_groups), hyperparameters(others)]


def _changed(then: list[dict[str, Any]], optimizer: Optimizer) -> frozenset[str]:
    """Names of what is not as it was then."""
    return frozenset(
        name
        for before, now in zip(then, _shared(optimizer), strict=True)
        for name, value in now.items()
        if name not in before or not same(before[name], value)
    )


def _unchanged_in(then: list[dict[str, Any]], optimizer: Optimizer, counters: Set[str]) -> frozenset[str]:
    """Names of what is as it was then, in dicts and plain objects of these names."""
    pairs = [
        (entries_of(name, before.get(name)), entries_of(name, now[name]))
        for before, now in zip(then, _shared(optimizer), strict=True)
        for name in counters & now.keys()
    ]
    entries = {name for before, now in pairs for name in (*before, *now)}
    return frozenset(name for name in entries if all(same(before.get(name), now.get(name)) for before, now in pairs))


# Of a closure, in the trial: some optimizers go by it, or skip the step.
_LOSSES = (1.0, 1e-6, 1e6, -1.0, float("inf"), float("nan"))


def _calls_closure(optimizer: Optimizer, with_state: bool) -> bool:
    """Whether a step calls its closure once, and does then what it does without: a deferred update has no closure."""
    given, without = Clone(optimizer, with_state), Clone(optimizer, with_state)
    calls = 0
    for step, loss in enumerate(_LOSSES):

        def closure(loss: float = loss) -> Tensor:
            nonlocal calls
            calls += 1
            return torch.tensor(loss, device="cpu")

        given.set_gradients(step)
        without.set_gradients(step)
        try:
            raw_step(given.optimizer)(given.optimizer, closure=closure)
        except Exception:
            return False
        raw_step(without.optimizer)(without.optimizer)
        # Not what it keeps of the loss elsewhere: `step()` itself does so.
        of_given, of_without = given.everything(), without.everything()
        is_alike = all(same(of_given[what], of_without[what]) for what in ("parameters", "gradients", "state"))
        if calls != step + 1 or not is_alike:
            return False
    return True
