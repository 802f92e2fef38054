"""Gather legs on copy engines: asked for by the options of `process_group=`, refused where they cannot be had, exact,
and from memory that is registered before the first leg and no longer when its communicator ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddp_crossover import device
from ddp_crossover.comm.agreement import DisagreementError
from ddp_crossover.nccl import copy_engine_link, nccl_link
from ddp_crossover.nccl.copy_engine_link import _lacks, _Rank, _why_not
from ddp_crossover.torch_internals import groups
from equivalence import SGD, Case, Run, plain_loop, snapshot
from fake_streams import fake_gpu
from models import DeepNet

ZERO_CTAS = 2


class _Backend:
    """What torch's backend on NCCL has for it; notes what happens to its memory."""

    mem_allocator = "ncclMemAlloc"

    def __init__(self, policy: int, events: list[str]) -> None:
        self.options = SimpleNamespace(config=SimpleNamespace(cta_policy=policy))
        self._events = events

    def name(self) -> str:
        return "nccl"

    def register_mem_pool(self, pool: str, symm: bool) -> None:
        assert pool == "pool of ncclMemAlloc" and symm
        self._events.append("registered")

    def deregister_mem_pool(self, pool: str) -> None:
        assert pool == "pool of ncclMemAlloc"
        self._events.append("deregistered")


@contextmanager
def _in_pool(events: list[str]) -> Iterator[None]:
    events.append("allocated")
    yield


@contextmanager
def _gpu_with_copy_engines(backend: Any, events: list[str], **gpus: Any) -> Iterator[None]:
    def noting(name: str) -> Any:
        call = getattr(nccl_link, name)

        def note(*args: Any, group: dist.ProcessGroup) -> Any:
            what = f"{name} of {group.group_desc}"
            if events[-1:] != [what]:
                events.append(what)
            return call(*args, group=group)

        return mock.patch.object(nccl_link, name, note)

    shutdown = dist.ProcessGroup.shutdown

    def ends(group: dist.ProcessGroup) -> None:
        events.append(f"end of {group.group_desc}")
        shutdown(group)

    seams = {
        "new_memory_pool": lambda allocator, device: f"pool of {allocator}",
        "in_memory_pool": lambda pool, device: _in_pool(events),
        "uuid": lambda device: f"gpu {dist.get_rank()}",
        "unreachable_peers": lambda device: [],
        "nccl_version": lambda: (2, 28, 9),
        **gpus,
    }
    with ExitStack() as stack:
        stack.enter_context(fake_gpu())
        # It is replaced once in a process, and here for the context only.
        groups._notice_shutdowns.cache_clear()
        stack.callback(groups._notice_shutdowns.cache_clear)
        stack.enter_context(mock.patch.object(dist.ProcessGroup, "shutdown", ends))
        stack.enter_context(mock.patch.object(copy_engine_link, "backend_of", lambda *of: backend))
        for name, seam in seams.items():
            stack.enter_context(mock.patch.object(device, name, seam))
        for name in ("_reduce_scatter", "_all_gather"):
            stack.enter_context(noting(name))
        yield


def _train(options: dict[str, Any] | None) -> tuple[dict[str, torch.Tensor], Run]:
    run = Run(
        Case(model=DeepNet, optimizer=SGD, steps=6, strict=False, dear=options or {}), with_dear=options is not None
    )
    for _ in plain_loop(run):
        pass
    return snapshot(run.model.module.state_dict()), run


def _plain() -> dict[str, torch.Tensor]:
    return _train(None)[0]


def _attached(policy: int, ends: str, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """The parameters in the end, and what has happened until then and at the end."""
    events: list[str] = []
    with _gpu_with_copy_engines(_Backend(policy, events), events):
        group = dist.new_group(group_desc="legs")
        parameters, run = _train({"process_group": group, "schedule": "dear"} | options)
        assert run.state.stats().pipelined_iterations
        before = events.copy()
        link: Any = run.state._link
        assert run.model.training and not link.is_closed  # what is dropped ends before
        if ends == "detach":
            run.detach()
        elif ends == "destroyed by the script":
            dist.destroy_process_group(link._gather_group)
        else:
            link._stream.synchronize()  # a program that ends while legs are under way leaves the memory registered
            link.shut_down()
    return parameters, before, events[len(before) :]


GATHERS = "_all_gather of ddp_crossover gather legs"
END = "end of ddp_crossover gather legs"


@pytest.mark.parametrize(
    ("ends", "options"),
    [
        ("detach", {}),
        ("detach", {"shard_optimizer": True}),
        ("detach", {"wire_dtype": torch.bfloat16}),
        ("destroyed by the script", {}),
        ("end of the program", {}),
    ],
    ids=str,
)
def test_gather_legs_have_registered_memory_until_their_communicator_ends(on_ranks, ends, options) -> None:
    plain = on_ranks(_plain, 2)
    for expected, (parameters, before, at_end) in zip(
        plain, on_ranks(_attached, 2, ZERO_CTAS, ends, options), strict=True
    ):
        if "wire_dtype" not in options:
            assert all(torch.equal(parameters[name], value) for name, value in expected.items())
        made, gathers = before.index("registered"), [place for place, what in enumerate(before) if what == GATHERS]
        # The first gather makes the communicator, with which the memory of all legs can be registered then.
        assert before.index("allocated") < gathers[0] < made < gathers[1]
        assert before.count("registered") == 1 and "allocated" not in before[made:]
        assert {"_all_gather of legs", "_reduce_scatter of ddp_crossover gather legs"}.isdisjoint(before)
        assert "_reduce_scatter of legs" in before
        assert at_end.count("deregistered") == 1
        assert END not in at_end or at_end.index("deregistered") < at_end.index(END)
        assert (END in at_end) == (ends != "end of the program")


def test_without_the_policy_nothing_changes(on_ranks) -> None:
    for _, before, at_end in on_ranks(_attached, 2, -(2**31), "detach", {}):
        assert {"allocated", "registered", "deregistered", GATHERS, END}.isdisjoint([*before, *at_end])
        assert "_all_gather of legs" in before


def _refused(policies: list[int], gpus: dict[str, list[Any]]) -> str:
    rank = dist.get_rank()
    mine = {name: mock.Mock(return_value=values[rank]) for name, values in gpus.items()}
    events: list[str] = []
    with _gpu_with_copy_engines(_Backend(policies[rank], events), events, **mine):
        try:
            _train({"process_group": dist.new_group(), "schedule": "dear"})
        except (ValueError, DisagreementError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("policies", "gpus", "message"),
    [
        ([ZERO_CTAS] * 2, {"nccl_version": [(2, 28, 3), (2, 27, 7)]}, "but on rank 1 NCCL 2.27.7 has none"),
        ([ZERO_CTAS] * 2, {"unreachable_peers": [["gpu 1"], []]}, "ranks 0 and 1 cannot access each other's memory"),
        ([ZERO_CTAS] * 2, {"uuid": ["one", "one"]}, "ranks 0 and 1 share a GPU"),
        ([ZERO_CTAS, 0], {}, "differs from rank 0 in its process_group: zero-CTA policy"),
    ],
    ids=["NCCL", "access", "one GPU", "ranks differ"],
)
def test_what_cannot_be_had_is_refused_on_all_ranks(on_ranks, policies, gpus, message) -> None:
    for said in on_ranks(_refused, 2, policies, gpus):
        assert message in said
        assert "leave out config.cta_policy" in said or "differs" in said


def _unsupported(backend: _Backend) -> str:
    raise RuntimeError("not supported")


_UNSUPPORTED = property(_unsupported)  # as seen on an H200 of a virtual machine


def test_what_a_rank_lacks_is_named() -> None:
    backend = _Backend(ZERO_CTAS, [])
    with mock.patch.object(device, "nccl_version", lambda: (2, 28, 9)):
        assert _lacks(backend, {}) is None
        assert _lacks(backend, {"NCCL_CUMEM_ENABLE": "1", "NCCL_P2P_DISABLE": "0"}) is None
        for name, value in {"NCCL_CUMEM_ENABLE": "0", "NCCL_WIN_ENABLE": "0", "NCCL_P2P_DISABLE": "1"}.items():
            assert f"{name}={value} in the environment" in str(_lacks(backend, {name: value}))
        assert "the backend nccl2 of torch" in str(_lacks(SimpleNamespace(name=lambda: "nccl2"), {}))
        with mock.patch.object(_Backend, "mem_allocator", _UNSUPPORTED):
            assert "NCCL allocates no memory of its own on this device (not supported)" in str(_lacks(backend, {}))


def test_ranks_on_several_hosts_and_a_lone_rank() -> None:
    rank = _Rank(None, "a", "0", [])
    assert _why_not([rank]) is None
    assert _why_not([rank, rank._replace(gpu="1"), rank._replace(gpu="2", host="b")]) == (
        "ranks 0 and 2 are on different hosts"
    )
