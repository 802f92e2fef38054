"""Attach makes what the first legs need: memory of all plans, the probe's, communicators. A backward, where plans come
and change, makes none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover import dear
from ddp_crossover.codecs.block_int8 import BlockInt8
from ddp_crossover.codecs.wire import Wire
from ddp_crossover.collectives import nccl_link
from ddp_crossover.dear import Pipeline
from ddp_crossover.fusion import FusionPlan
from ddp_crossover.planning import session as planning
from ddp_crossover.planning.link_probe import probe_codecs
from ddp_crossover.sharding.parameter_gathers import ParameterGathers
from fake_streams import fake_gpu
from models import INPUTS, DeepNet, MixedDtypeNet, OddNet
from plans import random_plans

STEPS = 20


def _storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _refuse(*args: Any, **options: Any) -> None:
    raise AssertionError("memory was allocated in a backward")


def _train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(3, INPUTS)).float().square().mean().backward()
        optimizer.step()


def storages_of_plans(make: Callable[[], nn.Module], options: dict[str, Any]) -> tuple[set[int], list[set[int]]]:
    """Where memory lies after attach, and where each of many random plans has its fusion buffers."""
    used: list[set[int]] = []
    make_pipeline = Pipeline.__init__

    def no_allocation(pipeline: Pipeline, *args: Any, **more: Any) -> None:
        with mock.patch.object(dear.torch, "zeros", _refuse):
            make_pipeline(pipeline, *args, **more)
        used.append(_storages(pipeline.layout.arenas.values()))

    with random_plans(11, schedules=("dear", "auto")), mock.patch.object(Pipeline, "__init__", no_allocation):
        ddp = DistributedDataParallel(make())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        state = dx.attach(ddp, optimizer, **options)
        made = _storages(state._reducer._in_force._memory.values())
        _train(ddp, optimizer, STEPS)
        state.detach()
    return made, used


@pytest.mark.parametrize("options", [{}, {"wire_dtype": torch.bfloat16}], ids=["as_they_are", "bf16"])
@pytest.mark.parametrize(
    "make", [DeepNet, OddNet, partial(MixedDtypeNet, torch.bfloat16)], ids=["deep", "odd", "mixed"]
)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.nightly)])
def test_every_plan_uses_the_memory_of_attach(on_ranks, world_size, make, options) -> None:
    for made, used in on_ranks(storages_of_plans, world_size, make, options):
        assert len(used) > 4
        assert all(storages == made for storages in used)
        assert bool(made) == bool(options)  # gradients that keep their dtype travel from DDP's buckets


def probes(options: dict[str, Any]) -> tuple[int, int, int]:
    """Probes of the link in attach, and later; elements that were allocated."""
    probe = planning.probe_link
    with mock.patch.object(planning, "probe_link", side_effect=probe) as probed:
        # Its buckets change once more after they have settled.
        ddp = DistributedDataParallel(DeepNet(), static_graph=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        state = dx.attach(ddp, optimizer, **options)
        at_attach = probed.call_count
        allocated = sum(arena.numel() for arena in state._reducer._in_force._memory.values())
        _train(ddp, optimizer, STEPS)
        state.detach()
    return at_attach, probed.call_count - at_attach, allocated


@pytest.mark.parametrize(
    ("options", "expected", "has_memory"),
    [
        ({}, 1, False),  # gradients travel from DDP's buckets
        ({"wire_dtype": torch.bfloat16}, 1, True),
        ({"fusion_mb": 0.01}, 1, False),
        ({"schedule": "dear", "wire_dtype": torch.bfloat16}, 0, True),
        ({"schedule": "allreduce", "wire_dtype": torch.bfloat16}, 0, False),
    ],
    ids=str,
)
def test_the_link_is_measured_at_attach_only(on_ranks, options, expected, has_memory) -> None:
    for at_attach, later, allocated in on_ranks(probes, 2, options):
        assert (at_attach, later) == (expected, 0)
        assert (allocated > 0) == has_memory


def first_uses(schedule: str) -> tuple[set[str], set[str]]:
    """The link's groups, and which of them have run something when attach returns."""
    used: set[dist.ProcessGroup] = set()

    def noting(name: str) -> Any:
        call = getattr(nccl_link, name)

        def note(*args: Any, group: dist.ProcessGroup) -> Any:
            used.add(group)
            return call(*args, group=group)

        return mock.patch.object(nccl_link, name, note)

    with ExitStack() as stack:
        stack.enter_context(fake_gpu())
        for name in ("_reduce_scatter", "_all_gather"):
            stack.enter_context(noting(name))
        ddp = DistributedDataParallel(DeepNet())
        state = dx.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), schedule=schedule, fusion_mb=1.0)
        link: Any = state._link
        assert link.sent_bytes == 0  # of no step
        groups = {"legs": link.process_group, "norms": link._small_group}
        state.detach()
    return set(groups), {name for name, group in groups.items() if group in used}


def landings(options: dict[str, Any]) -> tuple[set[int], list[set[int]]]:
    """Where memory lies after attach, and where each of many plans has updated parameters arrive."""
    used: list[set[int]] = []
    make_gathers = ParameterGathers.__init__

    def no_allocation(gathers: ParameterGathers, *args: Any, **more: Any) -> None:
        with mock.patch.object(torch, "zeros", _refuse):
            make_gathers(gathers, *args, **more)
        used.append(_storages(gathers._arenas.values()))

    with random_plans(11, schedules=("dear", "auto")), mock.patch.object(ParameterGathers, "__init__", no_allocation):
        ddp = DistributedDataParallel(DeepNet())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        state = dx.attach(ddp, optimizer, shard_optimizer=True, **options)
        made = _storages(state._reducer._in_force._memory.values())
        _train(ddp, optimizer, STEPS)
        state.detach()
    return made, used


def arenas_of_coded_and_plain_plans() -> tuple[set[int], list[tuple[bool, set[int]]]]:
    """Where memory lies after attach, and where plans with codes and without have their fusion buffers, in turn."""
    used: list[tuple[bool, set[int]]] = []
    make_pipeline = Pipeline.__init__

    def note(pipeline: Pipeline, plan: FusionPlan, *args: Any, **more: Any) -> None:
        make_pipeline(pipeline, plan, *args, **more)
        used.append((plan.is_coded, _storages(pipeline.layout.arenas.values())))

    with fake_gpu(), mock.patch.object(Pipeline, "__init__", note):
        ddp = DistributedDataParallel(DeepNet())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        state = dx.attach(ddp, optimizer, wire_dtype=torch.int8)
        made = _storages(state._reducer._in_force._memory.values())
        _train(ddp, optimizer, 5 * STEPS)
        assert not state._reducer._in_force._memory or state.tuning
        state.detach()
    return made, used


def test_plans_with_codes_and_without_use_the_memory_of_attach(on_ranks) -> None:
    for made, used in on_ranks(arenas_of_coded_and_plain_plans, 2):
        assert {is_coded for is_coded, _ in used} == {False, True}
        assert len(used) > 2
        assert all(storages <= made for _, storages in used)


def test_updated_parameters_arrive_in_the_memory_of_attach(on_ranks) -> None:
    for made, used in on_ranks(landings, 2, {"wire_dtype": torch.bfloat16}):
        assert len(used) > 4
        assert all(storages and storages < made for storages in used)


def first_uses_of_modes(options: dict[str, Any]) -> tuple[int, bool, list[str]]:
    """All-to-alls in attach, whether hosts have a group then, and where codes were probed."""
    probed: list[str] = []
    probe = planning.probe_codecs
    with ExitStack() as stack:
        stack.enter_context(fake_gpu())
        to_all = stack.enter_context(mock.patch.object(nccl_link, "_all_to_all", side_effect=nccl_link._all_to_all))

        def note(wire: Any, device: torch.device) -> float:
            probed.append(device.type)
            return probe(wire, torch.device("cpu"))

        stack.enter_context(mock.patch.object(planning, "probe_codecs", note))
        ddp = DistributedDataParallel(DeepNet())
        state = dx.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), **options)
        link: Any = state._link
        assert link.sent_bytes == 0  # of no step
        at_attach = to_all.call_count, link._host_group is not None
        state.detach()
    return *at_attach, probed


@pytest.mark.parametrize(
    ("options", "has_all_to_all", "has_host_group"),
    [
        ({}, False, False),
        ({"wire_dtype": torch.int8}, True, False),
        ({"compress": dx.TopK(0.1), "fusion_mb": 1.0}, True, False),  # sums travel as they are
        ({"shard_optimizer": True}, False, True),
        ({"weighted": True}, False, True),
    ],
    ids=["plain", "int8", "top-k", "sharded", "weighted"],
)
def test_what_a_mode_needs_is_connected_at_attach(on_ranks, options, has_all_to_all, has_host_group) -> None:
    for seen, hosts, _ in on_ranks(first_uses_of_modes, 2, options):
        assert (seen > 0, hosts) == (has_all_to_all, has_host_group)


def where_codes_are_probed(device_type: str) -> str:
    """The device of what is encoded."""
    devices = set()
    encode = BlockInt8.encode

    def note(codec: BlockInt8, values: torch.Tensor, *rest: Any) -> None:
        devices.update(each.device.type for each in (values, *rest))
        if values.device.type == "cpu":
            encode(codec, values, *rest)

    with mock.patch.object(BlockInt8, "encode", note), mock.patch.object(BlockInt8, "add", lambda *args: None):
        probe_codecs(Wire.of(torch.int8), torch.device(device_type))
    [device] = devices
    return device


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
def test_codes_are_probed_where_they_are_made(device_type) -> None:
    assert where_codes_are_probed(device_type) == device_type


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("schedule", ["auto", "dear"])
def test_communicators_exist_after_attach(on_ranks, world_size, schedule) -> None:
    for groups, used in on_ranks(first_uses, world_size, schedule):
        assert used == groups
