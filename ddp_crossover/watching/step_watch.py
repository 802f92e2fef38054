"""Watches a real step of an optimizer: whether it updates each parameter by itself, and what else it does.

The watch is there for the undecorated ``step`` only, not for a closure, which runs a forward and backward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.torch_internals.memory import Memory, memory_of, share_storage
from ddp_crossover.torch_internals.operations import Operation, OperationWatch, number_of
from ddp_crossover.watching.labels import Crossing, LabelledMemory
from ddp_crossover.watching.optimizer_snapshot import dotted_attributes, optimizer_parameters
from ddp_crossover.watching.update_guard import random_states, same_states
from ddp_crossover.watching.values import tensors_in


class Communicates(RuntimeError):
    """An optimizer is about to talk to other ranks where it must not."""


class Seen(NamedTuple):
    """What a step has done.

    Attributes:
        why_not: why its updates must not be deferred; None if they may be.
        edits_gradients: whether it has written to gradients.
        beyond_elements: an operation that looks at more than one element of a parameter at a time; None if none does.
        communicates: the operation by which it talks to other ranks, or None.
    """

    why_not: str | None
    edits_gradients: bool
    beyond_elements: str | None
    communicates: str | None


class StepWatch:
    """Watches one step.

    Attributes:
        trace: its operations, with numbers that were passed to them, in order.

    Args:
        optimizer: the optimizer, which holds the parameters, gradients, state and settings of the step.
        may_communicate: whether operations that talk to other ranks may run; else they raise :class:`Communicates`.
    """

    def __init__(self, optimizer: Optimizer, *, may_communicate: bool = True) -> None:
        self.trace: list[tuple[Any, ...]] = []
        self._optimizer = optimizer
        self._parameters = optimizer_parameters(optimizer)
        self._may_communicate = may_communicate
        self._operations = OperationWatch(self._before, self._after, self._opened)
        self._communicates: str | None = None
        self._random: str | None = None
        self._generators: dict[int, weakref.ref[torch.Generator]] = {}
        self._drawn_from: list[tuple[weakref.ref[torch.Generator], str]] = []
        self._reads_past_torch: str | None = None
        self._begin()

    # Around the step.

    def start(self) -> None:
        """Begin to watch."""
        self._operations.start()

    def stop(self) -> None:
        """End the watch, also if the step has raised."""
        self._operations.stop()

    def __enter__(self) -> StepWatch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def until_freed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of a step that end the watch when its frame is gone: after an error no hook runs."""
        return _EndsWatch.of(args, self)

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that runs out of sight. What it leaves is what the step begins with."""

        def call() -> Any:
            self._operations.stop()
            try:
                return closure()
            finally:
                self._begin()
                self._operations.start()

        return call

    def _begin(self) -> None:
        parameters = self._parameters
        self._memory = LabelledMemory(len(parameters))
        first_of: dict[Memory | None, int] = {}  # two parameters may be the same memory
        self._owners = [first_of.setdefault(memory_of(p), index) for index, p in enumerate(parameters)]
        self._places = [memory_of(parameter) for parameter in parameters]
        self._gradients = [parameter.grad for parameter in parameters]
        gradients: dict[int, int | None] = {}
        for owner, parameter in zip(self._owners, parameters, strict=True):
            if self._owners.count(owner) < 2 or parameter is parameters[owner]:
                self._memory.own(parameter, "value", owner)
            if parameter.grad is not None:
                shared = gradients.setdefault(id(parameter.grad), owner)
                gradients[id(parameter.grad)] = owner if shared == owner else None
        for grad in {id(grad): grad for grad in self._gradients if grad is not None}.values():
            self._memory.own(grad, "gradient", gradients[id(grad)])
        owner_of = {id(parameter): owner for owner, parameter in zip(self._owners, parameters, strict=True)}
        entries: dict[Any, Any] = self._optimizer.state
        for key, state in dict.items(entries):
            for tensor in tensors_in(state) if id(key) in owner_of else ():
                self._memory.own(tensor, "value" if tensor.dim() else "counter", owner_of[id(key)])
        for what, tensor in self._shared_tensors():
            self._memory.own(tensor, what, None)
        self._random_states = random_states(torch.device("cpu"))

    def _shared_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the optimizer that belong to no parameter, and what they are."""
        entries: dict[Any, Any] = self._optimizer.state
        for key, state in dict.items(entries):
            if not isinstance(key, Tensor):
                yield from ((_called(f"[{key!r}]"), tensor) for tensor in tensors_in(state))
        for name, value in dotted_attributes(self._optimizer).items():
            yield from ((_called(name), tensor) for tensor in tensors_in(value))
        # After the attributes, because the memory of a default may be that of a setting.
        for group in self._optimizer.param_groups:
            for name, value in group.items():
                if name != "params":
                    yield from ((_called(name), tensor) for tensor in tensors_in(value))

    def forget(self) -> None:
        """Let go of all tensors: the gradients' memory is looked at to tell whether anybody keeps it."""
        self._parameters.clear()
        self._gradients.clear()
        self._memory = LabelledMemory(0)

    # Around each operation.

    def _before(self, operation: Operation) -> None:
        if operation.communicates:
            self._communicates = self._communicates or operation.name
            if not self._may_communicate:
                raise Communicates(_communicates(operation.name))

    def _after(self, operation: Operation, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        values = [*args, *kwargs.values()]
        if operation.is_random:
            given = [self._generators.get(number_of(value)) for value in values if isinstance(value, torch.Generator)]
            generator = given[0] if given else None
            if generator is None or generator() is None:
                self._random = self._random or operation.name
            else:
                self._drawn_from.append((generator, operation.name))
        numbers = [value for value in values if isinstance(value, (bool, float))]
        self.trace.append((operation.name, *numbers))
        self._memory.note(operation, args, kwargs, out)

    def _opened(self, tensor: Tensor | torch.Generator, how: str) -> None:
        if isinstance(tensor, torch.Generator):
            with contextlib.suppress(TypeError):  # torch 2.11 refuses it: as if the generator were kept
                self._generators[number_of(tensor)] = weakref.ref(tensor)
            return
        if how != "tolist" and self._memory.of(tensor):
            self._reads_past_torch = self._reads_past_torch or how
        self._memory.note_read(f"Tensor.{how}()", tensor)

    # What has been seen.

    def seen(self, counters: Iterable[str], name_of: Callable[[Tensor], str] = lambda _: "one parameter") -> Seen:
        """What the step has done, after it.

        Args:
            counters: what it may change that belongs to no parameter.
            name_of: what parameters are called.
        """
        memory = self._memory
        for owner, parameter in zip(self._owners, self._parameters, strict=True):
            for tensor in tensors_in(dict.get(self._optimizer.state, parameter)):
                memory.keep(tensor, owner)
        for what, tensor in self._shared_tensors():
            memory.keep_shared(tensor, what)
        return Seen(
            next(self._reasons(set(map(_called, counters)), lambda index: name_of(self._parameters[index])), None),
            bool(memory.edited),
            memory.beyond_elements,
            self._communicates,
        )

    def _reasons(self, may_write: Collection[str], name_of: Callable[[int], str]) -> Iterator[str]:
        memory = self._memory
        if self._communicates is not None:
            yield _communicates(self._communicates)
        # From a generator that is gone after the step nobody else draws.
        kept = (name for generator, name in self._drawn_from if generator() is not None)
        if (random := self._random or next(kept, None)) is not None:
            yield f"its step() draws random numbers ({random}), which others would draw before a deferred update"
        if not same_states(self._random_states, random_states(torch.device("cpu"))):
            yield "its step() draws random numbers, which others would draw before a deferred update"
        if memory.opaque is not None:
            yield f"its step() works on {memory.opaque}, whose memory cannot be followed"
        if self._reads_past_torch is not None:
            yield f"its step() uses memory by Tensor.{self._reads_past_torch}(), where it cannot be followed"
        crossing = memory.crossing or memory.mixed_by_python()
        if crossing is not None:
            yield _crosses(crossing, name_of)
        for what, operation in memory.foreign.items():
            if what not in may_write:
                yield f"its step() writes to {what} ({operation}), which belongs to no parameter"
        if [memory_of(parameter) for parameter in self._parameters] != self._places:
            yield "its step() gives parameters other memory"
        if any(p.grad is not grad for p, grad in zip(self._parameters, self._gradients, strict=True)):
            yield "its step() replaces or drops gradients"
        if self._keeps_gradients():
            yield "its state keeps gradients, whose memory the next backward uses. Keep clones"

    def _keeps_gradients(self) -> bool:
        kept = [tensor for state in dict.values(self._optimizer.state) for tensor in tensors_in(state)]
        kept += [tensor for _, tensor in self._shared_tensors()]
        return share_storage(kept, (grad for grad in self._gradients if grad is not None))


class _EndsWatch(tuple[Any, ...]):
    @classmethod
    def of(cls, args: tuple[Any, ...], watch: StepWatch) -> _EndsWatch:
        made = cls(args)
        made.watch = watch
        return made

    watch: StepWatch

    def __del__(self) -> None:
        self.watch.stop()
        self.watch.forget()


def _called(shared: str) -> str:
    """What belongs to no parameter, in words; by its name in a param group, its ``.attribute`` or ``[key]``."""
    if shared.startswith("."):
        return f"its attribute {shared}"
    return f"its state under {shared[1:-1]}" if shared.startswith("[") else f"{shared!r} in a param group"


def _communicates(operation: str) -> str:
    return (
        f"its step() communicates with the other ranks ({operation}), and deferred updates run when a rank first uses "
        "a parameter, which may be at another moment on each rank"
    )


def _crosses(crossing: Crossing, name_of: Callable[[int], str]) -> str:
    source, target = name_of(crossing.source), name_of(crossing.target)
    target = "another one" if target == source else target
    return (
        f"it does not update each parameter independently: data of {source} decides about {target} "
        f"({crossing.operation})"
    )
