"""Follows through the operations of a step of which parameters each tensor holds data.

Each parameter has a label. Its value, gradient and state carry it. An operation passes the labels of what it reads on
to what it writes; one on lists of tensors (``_foreach_``, ``_fused_``) does so position by position. Labels belong to
memory, not to tensor objects, so views and in-place operations need no rules of their own.

A number or truth that Python gets may decide about all that comes later. A loop that reads and writes one parameter
after the other is a step of each by itself all the same; one that reads several before it writes the first is not.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_crossover.torch_internals.memory import memory_of, number_kept
from ddp_crossover.torch_internals.operations import Operation, rounds_by_place, tensors_of

Labels = int
"""A set of labels, one bit each: that of a parameter's data, and those of its counters, which are numbers in its state
that do not depend on data, as far as is known."""


class Owned(NamedTuple):
    """Memory that was there before the step.

    Attributes:
        start: its first byte in its storage.
        stop: the byte after its last one.
        what: "gradient", "counter", "value" (also for the rest of the state), or what it is if it is no parameter's.
        owner: index of its parameter; None if it has none.
        label: its label; 0 if it has no owner.
    """

    start: int
    stop: int
    what: str
    owner: int | None
    label: Labels


class Crossing(NamedTuple):
    """Data of one parameter that came into another one's value or state, or decided about it.

    Attributes:
        operation: the operation that wrote or revealed it.
        source: the parameter whose data it was.
        target: the parameter that was written.
    """

    operation: str
    source: int
    target: int


class _Rows(NamedTuple):
    """Labels of tensors that were put one after the other, as by ``torch.stack``.

    Attributes:
        stops: where each ends, in elements.
        labels: those of each.
        itemsize: bytes of an element.
    """

    stops: tuple[int, ...]
    labels: tuple[Labels, ...]
    itemsize: int = 1

    def joined(self) -> Labels:
        """All labels."""
        return functools.reduce(operator.or_, self.labels, 0)

    def between(self, start: int, stop: int) -> slice:
        """The rows that are between two bytes."""
        first = bisect.bisect_right(self.stops, start // self.itemsize)
        last = bisect.bisect_left(self.stops, -(-stop // self.itemsize))
        return slice(min(first, len(self.stops) - 1), last + 1)

    def with_labels(self, more: Iterable[Labels], rows: slice = slice(None)) -> _Rows:
        labels = list(self.labels)
        labels[rows] = map(operator.or_, labels[rows], more)
        return self._replace(labels=tuple(labels))


class _Event(NamedTuple):
    operation: str
    read: Labels  # what Python got, or
    written: int | None  # the parameter that was written


class LabelledMemory:
    """All memory that a step uses.

    Args:
        count: number of parameters.

    Attributes:
        crossing: the first write of one parameter's data to another one, or None.
        edited: parameters whose gradients were written to.
        foreign: what was written to that belongs to no parameter, with the operation.
        opaque: what cannot be followed, or None.
        beyond_elements: the first operation on data that looks at more than one element at a time, or whose last bits
            are others on a slice; None if there is none.
    """

    def __init__(self, count: int) -> None:
        self.crossing: Crossing | None = None
        self.edited: set[int] = set()
        self.foreign: dict[str, str] = {}
        self.opaque: str | None = None
        self.beyond_elements: str | None = None
        self._data: Labels = (1 << count) - 1
        self._owned: dict[int, list[Owned]] = {}
        self._made: dict[int, _Rows] = {}
        self._kept: list[object] = []
        self._owner_of: dict[Labels, int] = {1 << index: index for index in range(count)}
        self._labels_of: dict[int, Labels] = {index: 1 << index for index in range(count)}
        self._into_counters: dict[Labels, Labels] = {}
        self._events: list[_Event] = []

    def own(self, tensor: Tensor, what: str, owner: int | None) -> None:
        """Note whose memory this is."""
        place = memory_of(tensor)
        if place is None:
            self.opaque = self.opaque or f"a {type(tensor).__name__}"
        elif place.storage:
            label = 0 if owner is None else 1 << owner
            if owner is not None and what == "counter":
                label = 1 << len(self._owner_of)
                self._owner_of[label] = owner
                self._labels_of[owner] |= label
            pieces = self._owned.setdefault(place.storage, [])
            bisect.insort(pieces, Owned(place.start, place.stop, what, owner, label), key=lambda owned: owned.start)
            self._kept.append(number_kept(tensor))

    def of(self, tensor: Tensor) -> Labels:
        """The labels of what a tensor holds."""
        place = memory_of(tensor)
        if place is None or not place.storage:
            return 0
        rows = self._made.get(place.storage)
        labels = 0
        if rows is not None:
            labels = rows._replace(labels=rows.labels[rows.between(place.start, place.stop)]).joined()
        for owned in self._owned_at(*place):
            labels |= owned.label
        return labels

    def _owned_at(self, storage: int, start: int, stop: int) -> Iterator[Owned]:
        pieces = self._owned.get(storage, ())
        if len(pieces) == 1:
            yield pieces[0]
            return
        first = bisect.bisect_right(pieces, start, key=lambda owned: owned.start) - 1
        for owned in pieces[max(first, 0) :]:
            if owned.start >= stop:
                break
            if owned.stop > start:
                yield owned

    # What an operation does.

    def note(self, operation: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Follow an operation that has run."""
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        if operation.base.startswith("_fused_") and kwargs.get("grad_scale") is None:
            # Their schema says that they write to gradients, which they do only to unscale them.
            operation = operation._replace(written={key: how for key, how in operation.written.items() if key != 1})
        if not operation.is_listwise:
            self._note_one(operation, arguments, out)
            return
        length = next((len(value) for _, value in arguments if isinstance(value, (list, tuple))), 0)
        for index in range(length):
            own: list[tuple[int | str, Any]] = [
                (place, value[index] if _is_list(value, length) else value) for place, value in arguments
            ]
            self._note_one(operation, own, out[index] if _is_list(out, length) else None)

    def note_read(self, operation: str, tensor: Tensor) -> None:
        """Follow a tensor whose values Python gets."""
        if labels := self.of(tensor):
            self._events.append(_Event(operation, labels, None))

    def _note_one(self, operation: Operation, arguments: list[tuple[int | str, Any]], out: Any) -> None:
        labels, read, written = 0, [], []
        for place, value in arguments:
            overwrites = operation.written.get(place)
            for tensor in tensors_of(value):
                if overwrites is not None:
                    written.append(tensor)
                if not overwrites and not operation.is_constant:
                    labels |= self.of(tensor)
                    read.append(tensor)
        if operation.is_revealing and labels:
            self._events.append(_Event(operation.name, labels, None))
        made = list(tensors_of(out))
        is_elementwise = self._is_elementwise(operation, read, written or made)
        if labels & self._data and self.beyond_elements is None:
            if not is_elementwise:
                self.beyond_elements = operation.name
            elif rounds_by_place(operation, [value for _, value in arguments]):
                self.beyond_elements = f"{operation.name}, which rounds an element by its place"
        for tensor in written or made:
            rows = _Rows((tensor.numel(),), (labels,))
            if _lines_up(operation, arguments, read):
                rows = _Rows(tuple(itertools.accumulate(each.numel() for each in read)), tuple(map(self.of, read)))
            elif is_elementwise:
                rows = self._rows_of(read, tensor) or rows
            if written:
                self._write(operation.name, tensor, rows)
            else:
                self._make(tensor, rows, more=operation.base == "clone")

    def _rows_of(self, read: Iterable[Tensor], result: Tensor) -> _Rows | None:
        """The rows of an elementwise result; None if they are not those of what was read."""
        rows: _Rows | None = None
        labels = 0
        for tensor in read:
            place = memory_of(tensor)
            of_one = None if place is None else self._made.get(place.storage)
            if of_one is None or len(of_one.stops) == 1 or tensor.numel() != result.numel():
                labels |= self.of(tensor)
            elif of_one.stops[-1] != tensor.numel() or not tensor.is_contiguous():
                return None
            elif rows is None:
                rows = of_one
            elif rows.stops == of_one.stops:
                rows = rows.with_labels(of_one.labels)
            else:
                return None
        return None if rows is None else rows.with_labels(itertools.repeat(labels))

    def _is_elementwise(self, operation: Operation, read: list[Tensor], results: list[Tensor]) -> bool:
        numel = max((tensor.numel() for tensor in results), default=1)
        if operation.base == "index_put" and any(tensor.dtype == torch.int64 for tensor in read):
            return False
        return operation.is_elementwise and all(
            tensor.numel() == numel or (tensor.numel() == 1 and not self.of(tensor) & self._data) for tensor in read
        )

    def _make(self, tensor: Tensor, rows: _Rows, more: bool = False) -> None:
        place = memory_of(tensor)
        if place is None:
            self.opaque = self.opaque or f"a {type(tensor).__name__}"
        elif place.storage and place.storage not in self._owned:
            if place.storage not in self._made:
                if (numel := tensor.untyped_storage().nbytes() // tensor.itemsize) > tensor.numel():
                    rows = _Rows((numel,), (rows.joined(),))
                self._made[place.storage] = rows._replace(itemsize=tensor.itemsize)
                self._kept.append(number_kept(tensor))
            elif more:  # one deepcopy of several views of one storage
                self._made[place.storage] = self._made[place.storage].with_labels(itertools.repeat(rows.joined()))

    def _write(self, operation: str, tensor: Tensor, rows: _Rows) -> None:
        place = memory_of(tensor)
        if place is None:
            self.opaque = self.opaque or f"a {type(tensor).__name__}"
        elif place.storage in self._owned:
            for owned in self._owned_at(*place):
                self._write_owned(operation, owned, rows.joined())
        elif place.storage in self._made:
            if place.stop - place.start < tensor.untyped_storage().nbytes():
                old = self._made[place.storage]
                rows = old.with_labels(itertools.repeat(rows.joined()), old.between(place.start, place.stop))
                self._made[place.storage] = rows
            else:
                self._made[place.storage] = rows._replace(itemsize=tensor.itemsize)
        elif operation.startswith("aten.resize"):
            self._make(tensor, rows)
        elif place.storage:
            self.foreign.setdefault("memory that is no parameter's", operation)

    def _write_owned(self, operation: str, owned: Owned, labels: Labels) -> None:
        if owned.owner is None:
            has_data = labels & self._data
            self.foreign.setdefault(f"{owned.what}, with data of a parameter" if has_data else owned.what, operation)
            return
        others = labels & ~self._labels_of[owned.owner]
        if others and self.crossing is None:
            self.crossing = Crossing(operation, self._first_owner(others), owned.owner)
        if owned.what == "counter":
            self._into_counters[owned.label] = self._into_counters.get(owned.label, 0) | labels
            return
        if owned.what == "gradient":
            self.edited.add(owned.owner)
        self._events.append(_Event(operation, 0, owned.owner))

    def _first_owner(self, labels: Labels) -> int:
        return self._owner_of[labels & -labels]

    # What a step has done.

    def keep(self, tensor: Tensor, owner: int) -> None:
        """Note what a parameter's state holds after the step."""
        if self.crossing is None and (others := self.of(tensor) & ~self._labels_of[owner]):
            self.crossing = Crossing("its state", self._first_owner(others), owner)

    def keep_shared(self, tensor: Tensor, what: str) -> None:
        """Note what belongs to no parameter and was there, or was made, in the step."""
        if self.of(tensor) & self._data:
            self.foreign.setdefault(f"{what}, with data of a parameter", "a tensor that it keeps there")

    def mixed_by_python(self) -> Crossing | None:
        """Where Python has read data of parameters and has then written to others, out of turn."""
        no_counters = self._no_counters()
        events = [each._replace(read=self._data_in(each.read, no_counters)) for each in self._events]
        events = [each for each in events if each.read or each.written is not None]
        first_read: dict[int, int] = {}
        last_write: dict[int, int] = {}
        for time, event in enumerate(events):
            if event.written is not None:
                last_write[event.written] = time
            elif event.read & event.read - 1:
                written = next((later.written for later in events[time:] if later.written is not None), None)
                if written is not None:
                    other = _first(event.read & ~(1 << written))
                    return Crossing(event.operation, other, written)
            else:
                first_read.setdefault(_first(event.read), time)
        for owner, begin in first_read.items():
            for event in events[begin : last_write.get(owner, begin)]:
                other = event.written if event.written is not None else _first(event.read)
                if other != owner:
                    return Crossing(events[begin].operation, owner, other)
        return None

    def _no_counters(self) -> Labels:
        """Numbers in states into which data has come, also from each other, in whatever order."""
        data, found = self._data, -1
        while data != found:
            found = data
            data |= sum(counter for counter, labels in self._into_counters.items() if labels & found)
        return data & ~self._data

    def _data_in(self, read: Labels, no_counters: Labels) -> Labels:
        data, of_counters = read & self._data, read & no_counters
        while of_counters:
            data |= 1 << self._first_owner(of_counters)
            of_counters &= of_counters - 1
        return data


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == length


def _lines_up(operation: Operation, arguments: list[tuple[int | str, Any]], read: list[Tensor]) -> bool:
    """Whether it puts several tensors one after the other in memory."""
    return operation.base in ("stack", "cat") and len(read) > 1 and (len(arguments) == 1 or arguments[1][1] == 0)


def _first(labels: Labels) -> int:
    return (labels & -labels).bit_length() - 1
