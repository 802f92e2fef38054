"""Attach makes what the first legs need: memory of all plans, the probe's, communicators. A backward, where plans come
and change, makes none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.addons.codes import wire as coded_wire
from ddp_crossover.addons.codes.block_int8 import BlockInt8
from ddp_crossover.addons.codes.choice import fastest
from ddp_crossover.addons.codes.wire import wire_of
from ddp_crossover.addons.shards.parameter_gathers import ParameterGathers
from ddp_crossover.dear import Pipeline
from ddp_crossover.fusion import FusionPlan
from ddp_crossover.nccl import nccl_link
from ddp_crossover.plan import session as planning
from fake_streams import fake_gpu
from models import INPUTS, DeepNet, MixedDtypeNet, OddNet
from plans import random_plans

STEPS = 20
BF16 = {"wire_dtype": torch.bfloat16}


def _storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _refuse(*args: Any, **options: Any) -> None:
    raise AssertionError("memory was allocated in a backward")


def _attached(make: Callable[[], nn.Module], options: dict[str, Any], **ddp_options: Any) -> tuple[Any, Any, Any]:
    ddp = DistributedDataParallel(make(), **ddp_options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    return ddp, optimizer, dx.attach(ddp, optimizer, **options)


def _train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(3, INPUTS)).float().square().mean().backward()
        optimizer.step()


def _memory(state: dx.DearState) -> Any:
    return state._reducer._in_force._memory.values()


def storages_of_plans(
    make: Callable[[], nn.Module], options: dict[str, Any], of: type, memory_of: Callable[[Any], Any]
) -> tuple[set[int], list[set[int]]]:
    """Where memory lies after attach, and where each of many random plans has that of its object `of` a class."""
    used: list[set[int]] = []
    init = of.__init__

    def no_allocation(made: Any, *args: Any, **more: Any) -> None:
        with mock.patch.object(torch, "zeros", _refuse):
            init(made, *args, **more)
        used.append(_storages(memory_of(made)))

    with random_plans(11, schedules=("dear", "auto")), mock.patch.object(of, "__init__", no_allocation):
        ddp, optimizer, state = _attached(make, options)
        made = _storages(_memory(state))
        _train(ddp, optimizer, STEPS)
        state.detach()
    return made, used


def _arenas(pipeline: Pipeline) -> Any:
    return pipeline.layout.arenas.values()


MIXED = partial(MixedDtypeNet, torch.bfloat16)


@pytest.mark.parametrize(
    ("world_size", "make", "options"), [(1, DeepNet, BF16), (2, DeepNet, {}), (2, OddNet, BF16), (2, MIXED, BF16)]
)
def test_every_plan_uses_the_memory_of_attach(on_ranks, world_size, make, options) -> None:
    for made, used in on_ranks(storages_of_plans, world_size, make, options, Pipeline, _arenas):
        assert len(used) > 4
        assert all(storages == made for storages in used)
        assert bool(made) == bool(options)  # gradients that keep their dtype travel from DDP's buckets


def probes(options: dict[str, Any]) -> tuple[int, int, int]:
    """Probes of the link in attach, and later; elements that were allocated."""
    with mock.patch.object(planning, "probe_link", side_effect=planning.probe_link) as probed:
        # Its buckets change once more after they have settled.
        ddp, optimizer, state = _attached(DeepNet, options, static_graph=True)
        at_attach = probed.call_count
        allocated = sum(arena.numel() for arena in _memory(state))
        _train(ddp, optimizer, STEPS)
        state.detach()
    return at_attach, probed.call_count - at_attach, allocated


@pytest.mark.parametrize(
    ("options", "expected", "has_memory"),
    [
        ({}, 1, False),  # gradients travel from DDP's buckets
        (BF16, 1, True),
        ({"fusion_mb": 0.01}, 1, False),
        ({"schedule": "dear"} | BF16, 0, True),
        ({"schedule": "allreduce"} | BF16, 0, False),
    ],
    ids=str,
)
def test_the_link_is_measured_at_attach_only(on_ranks, options, expected, has_memory) -> None:
    for at_attach, later, allocated in on_ranks(probes, 2, options):
        assert (at_attach, later) == (expected, 0)
        assert (allocated > 0) == has_memory


def arenas_of_coded_and_plain_plans() -> tuple[set[int], list[tuple[bool, set[int]]]]:
    """Where memory lies after attach, and where plans with codes and without have their fusion buffers, in turn."""
    used: list[tuple[bool, set[int]]] = []
    make_pipeline = Pipeline.__init__

    def note(pipeline: Pipeline, plan: FusionPlan, *args: Any, **more: Any) -> None:
        make_pipeline(pipeline, plan, *args, **more)
        used.append((plan.is_coded, _storages(_arenas(pipeline))))

    with fake_gpu(), mock.patch.object(Pipeline, "__init__", note):
        ddp, optimizer, state = _attached(DeepNet, {"wire_dtype": torch.int8})
        made = _storages(_memory(state))
        _train(ddp, optimizer, 5 * STEPS)
        assert not _memory(state) or state.tuning
        state.detach()
    return made, used


def test_plans_with_codes_and_without_use_the_memory_of_attach(on_ranks) -> None:
    for made, used in on_ranks(arenas_of_coded_and_plain_plans, 2):
        assert {is_coded for is_coded, _ in used} == {False, True}
        assert len(used) > 2
        assert all(storages <= made for _, storages in used)


def _landings(gathers: ParameterGathers) -> Any:
    return gathers._arenas.values()


def test_updated_parameters_arrive_in_the_memory_of_attach(on_ranks) -> None:
    options = {"shard_optimizer": True} | BF16
    for made, used in on_ranks(storages_of_plans, 2, DeepNet, options, ParameterGathers, _landings):
        assert len(used) > 4
        assert all(storages and storages < made for storages in used)


class FirstUses(NamedTuple):
    """What was used in attach: each group of the link, by name; all-to-alls; whether there is a group of hosts."""

    groups: dict[str, bool]
    all_to_alls: int
    has_host_group: bool


def first_uses(options: dict[str, Any]) -> FirstUses:
    """Of an NCCL link."""
    used: set[dist.ProcessGroup] = set()

    def noting(name: str) -> Any:
        call = getattr(nccl_link, name)

        def note(*args: Any, group: dist.ProcessGroup) -> Any:
            used.add(group)
            return call(*args, group=group)

        return mock.patch.object(nccl_link, name, note)

    probe = coded_wire.seconds_per_element
    with ExitStack() as stack:
        stack.enter_context(fake_gpu())
        to_all = stack.enter_context(mock.patch.object(nccl_link, "_all_to_all", side_effect=nccl_link._all_to_all))
        cpu = torch.device("cpu")
        on_cpu = mock.patch.object(coded_wire, "seconds_per_element", lambda codec, device: probe(codec, cpu))
        stack.enter_context(on_cpu)
        for name in ("_reduce_scatter", "_all_gather"):
            stack.enter_context(noting(name))
        _ddp, _, state = _attached(DeepNet, options)  # what is dropped ends
        link: Any = state._link
        assert link.sent_bytes == 0  # of no step
        groups = {"legs": link.process_group in used, "norms": link._small_group in used}
        uses = FirstUses(groups, to_all.call_count, link._host_group is not None)
        state.detach()
    return uses


@pytest.mark.parametrize(
    ("options", "has_all_to_all", "has_host_group"),
    [
        ({"fusion_mb": 1.0}, False, False),  # without the probe of the link
        ({"schedule": "dear"}, False, False),
        ({"wire_dtype": torch.int8}, True, False),
        ({"compress": dx.TopK(0.1), "fusion_mb": 1.0}, True, False),  # sums travel as they are
        ({"shard_optimizer": True}, False, True),
        ({"weighted": True}, False, True),
    ],
    ids=["plain", "dear", "int8", "top-k", "sharded", "weighted"],
)
def test_what_a_mode_needs_is_connected_at_attach(on_ranks, options, has_all_to_all, has_host_group) -> None:
    for groups, all_to_alls, hosts in on_ranks(first_uses, 2, options):
        assert all(groups.values()), groups
        assert (all_to_alls > 0, hosts) == (has_all_to_all, has_host_group)


def where_codes_are_probed(device_type: str) -> str:
    """The device of what is encoded."""
    devices = set()
    wire = wire_of(torch.int8, on_host=device_type == "cpu")
    kind = fastest(BlockInt8, on_host=device_type == "cpu")
    encode = kind.encode

    def note(codec: BlockInt8, values: torch.Tensor, *rest: Any) -> None:
        devices.update(each.device.type for each in (values, *rest))
        if values.device.type == "cpu":
            encode(codec, values, *rest)

    with mock.patch.object(kind, "encode", note), mock.patch.object(kind, "add", lambda *args: None):
        wire.codec_s_per_element(torch.device(device_type))
    [device] = devices
    return device


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
def test_codes_are_probed_where_they_are_made(device_type) -> None:
    assert where_codes_are_probed(device_type) == device_type
