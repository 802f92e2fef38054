"""What a script has made of the entries of an optimizer's state."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from ddp_crossover.torch_internals.memory import Memory, which_overlap
from ddp_crossover.watching.lazy_state import make_state_lazy, make_state_plain
from ddp_crossover.watching.state_entries import Entries, entries_of_state, why_entries_depend

pytestmark = pytest.mark.quick


def _stepped(kind: Any, **settings: Any) -> Optimizer:
    optimizer = kind([Parameter(torch.ones(3)), Parameter(torch.ones(2, 2))], lr=0.1, **settings)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("kind", "settings"), [(AdamW, {"amsgrad": True}), (SGD, {"momentum": 0.9}), (SGD, {})])
def test_as_torch_makes_them(kind: Any, settings: dict[str, Any]) -> None:
    optimizer = _stepped(kind, **settings)
    assert entries_of_state(optimizer) == Entries(share_memory=False, are_usual=True)
    assert why_entries_depend(optimizer) is None


def test_one_count_for_all() -> None:
    optimizer, count = _stepped(AdamW), torch.tensor(5.0)
    for entry in optimizer.state.values():
        entry["step"] = count
    assert "share a part" in str(why_entries_depend(optimizer))


@pytest.mark.parametrize("count", [torch.tensor(5), 5], ids=["int64", "a number"])
def test_counts_of_another_kind(count: Any) -> None:
    optimizer = _stepped(AdamW)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] = count
    assert entries_of_state(optimizer)[:2] == (False, False)


def test_they_are_looked_at_again_after_others_have() -> None:
    optimizer, model, count = _stepped(AdamW), object(), torch.tensor(5.0)
    make_state_lazy(optimizer, model)
    make_state_lazy(optimizer, model, lambda: None)
    known = entries_of_state(optimizer)
    assert entries_of_state(optimizer) is known
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p]["step"] = count
    assert entries_of_state(optimizer).share_memory


@pytest.mark.parametrize("replaces", [False, True])
def test_a_plain_optimizer_keeps_nothing_of_a_lazy_state(replaces: bool) -> None:
    optimizer, model = _stepped(AdamW), object()
    before = set(vars(optimizer))
    make_state_lazy(optimizer, model, lambda: None)
    if replaces:
        optimizer.load_state_dict(optimizer.state_dict())
    make_state_plain(optimizer, model)
    assert type(optimizer.state) is defaultdict and set(vars(optimizer)) == before


def _one_part(parts: Any) -> Optimizer:
    """Each parameter gets the next of these parts as a further entry of its state."""
    optimizer = _stepped(AdamW)
    for entry, part in zip(optimizer.state.values(), parts, strict=True):
        entry["part"] = part
    return optimizer


@pytest.mark.parametrize(
    ("parts", "share"),
    [
        (torch.tensor(7.0).expand(2).unbind(), True),
        (torch.zeros(6).unfold(0, 4, 2).unbind(), True),
        (torch.zeros(6).view(2, 3).unbind(), False),
        ([[0, 1.0]] * 2, True),
        ([[0, 1.0], [0, 1.0]], False),
        ([(torch.zeros(0),)] * 2, True),
        ([torch.zeros(0), torch.zeros(0)], False),
    ],
    ids=["expanded", "overlapping", "parts of one buffer", "a list", "lists", "one empty tensor", "empty tensors"],
)
def test_memory_that_two_entries_share(parts: Any, share: bool) -> None:
    assert entries_of_state(_one_part(parts)).share_memory == share


def test_one_entry_for_all() -> None:
    optimizer = _stepped(AdamW)
    entry = {"step": 7}
    optimizer.state.update((parameter, entry) for parameter in optimizer.param_groups[0]["params"])
    assert entries_of_state(optimizer).share_memory


def test_one_parameter_may_have_a_part_twice() -> None:
    optimizer = _stepped(AdamW)
    for entry in optimizer.state.values():
        entry["again"] = entry["exp_avg"]
    assert not entries_of_state(optimizer).share_memory


_PLACES = st.builds(
    lambda storage, start, size: Memory(storage, start, start + size),
    st.integers(1, 2),
    st.integers(0, 9),
    st.integers(1, 5),
)


@given(st.lists(st.tuples(st.none() | st.just(Memory(0, 0, 0)) | _PLACES, st.integers(0, 4)), max_size=9))
def test_what_overlaps_is_what_a_look_at_each_pair_finds(places: list[tuple[Memory | None, int]]) -> None:
    known = [(place, number) for place, number in places if place is not None]
    assert which_overlap(places) == {
        number
        for one, number in known
        for other, another in known
        if number != another and one.storage == other.storage and one.start < other.stop and other.start < one.stop
    }
