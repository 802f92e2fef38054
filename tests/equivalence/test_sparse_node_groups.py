"""HiTopKComm: a sparse code of each node's sum, against one process that computes what all ranks must have.

The simulation knows the paper's five steps and the plan, and selects by `torch.topk`. It uses no codec of the package.
"""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ddp_crossover as dx
from ddp_crossover.addons.codes.wire import CodedWire
from equivalence import SGD, STEPS, Case, Run, assert_same, snapshot, train_step
from models import DeepNet
from node_groups import (
    CROSSED,
    INTERLEAVED,
    TWO_BY_TWO,
    TWO_NODES,
    Layout,
    NodeOrder,
    add_up,
    check_on_nodes,
    on_nodes,
    world_size,
)
from wirings import SkippingNet

DENSITY = 0.25
SPARSE = {"groups": "node", "compress": dx.TopK(DENSITY, selector="exact")}
SEVERAL_PER_GROUP = {"fusion_mb": 1e-3}


class Step(NamedTuple):
    """One training step as a rank has seen it: by name of the parameter, and before division by the world size."""

    own: dict[str, torch.Tensor]
    reduced: dict[str, torch.Tensor]
    plan: Any


def _own_gradients(run: Run, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """What backward gives this rank alone."""
    module = copy.deepcopy(run.model.module)
    gradients = torch.autograd.grad(run.loss(module(x), y), list(module.parameters()))
    return {name: g for (name, _), g in zip(module.named_parameters(), gradients, strict=True)}


def _step(run: Run, number: int) -> Step:
    x, y = run.batch(number)
    own = _own_gradients(run, x, y)
    train_step(run, x, y)
    reduced = {name: p.grad.clone() for name, p in run.model.module.named_parameters()}
    return Step(own, reduced, run.state.plan)


def _of_all_ranks(value: Any) -> list[Any]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


class Simulation:
    """All ranks in one process.

    Attributes:
        residuals: by rank and number of the group, what a rank has left out of its node's sum of its slice.
    """

    def __init__(self, layout: Layout, density: float, *, feedback: bool = True) -> None:
        self.layout = layout
        self.density = density
        self.feedback = feedback
        self.residuals: dict[tuple[int, int], torch.Tensor] = {}

    def reduce(self, plan: Any, gradients: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The mean that all ranks must have, for the parameters that are coded."""
        reduced: dict[str, torch.Tensor] = {}
        for group in plan.groups:
            names = [plan.gradients[piece.parameter].name for piece in group.pieces]
            if not plan.gradients[group.pieces[0].parameter].is_coded:
                continue
            total = self._reduce_group(group.index, [self._buffer(plan, group, one) for one in gradients])
            for piece, name, low in zip(group.pieces, names, plan.places_of(group), strict=True):
                like = gradients[0][name]
                flat = reduced.setdefault(name, torch.full((like.numel(),), torch.nan))
                flat[piece.start : piece.start + piece.numel] = total[low : low + piece.numel]
        return {name: flat.view_as(gradients[0][name]) for name, flat in reduced.items()}

    def _buffer(self, plan: Any, group: Any, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        buffer = torch.zeros(group.numel)
        for piece, low in zip(group.pieces, plan.places_of(group), strict=True):
            flat = gradients[plan.gradients[piece.parameter].name].flatten()
            buffer[low : low + piece.numel] = flat[piece.start : piece.start + piece.numel] / len(self._ranks)
        return buffer

    @property
    def _ranks(self) -> list[int]:
        return [rank for node in self.layout for rank in node]

    def _reduce_group(self, index: int, buffers: list[torch.Tensor]) -> torch.Tensor:
        places = len(self.layout[0])
        slices = [buffer.chunk(places) for buffer in buffers]
        total = []
        for place in range(places):
            sums = None
            for node in self.layout:
                on_node = slices[node[0]][place].clone()  # 1: the dense sum inside of the node
                for rank in node[1:]:
                    on_node += slices[rank][place]
                sent = self._select(index, node[place], on_node)
                sums = sent if sums is None else sums + sent  # 4: in the order of the nodes
            total.append(sums)
        return torch.cat(total)  # 5: the dense all-gather inside of the node

    def _select(self, index: int, rank: int, values: torch.Tensor) -> torch.Tensor:
        if self.feedback:
            values = values + self.residuals.get((rank, index), torch.zeros_like(values))  # 2
        chosen = values.abs().topk(max(round(self.density * len(values)), 1)).indices  # 3
        sent = torch.zeros_like(values)
        sent[chosen] = values[chosen]
        self.residuals[rank, index] = values - sent
        return sent


def _compare_with_simulation(
    layout: Layout, dear: dict[str, Any], density: float, feedback: bool, restart_at: int = -1
) -> None:
    """With a restart the simulation goes on with the residuals that it has. The first iterations after it are dense."""
    simulation = Simulation(layout, density, feedback=feedback)
    dear = {**SPARSE, **dear, "compress": dx.TopK(density, selector="exact")}
    with on_nodes(layout), mock.patch.object(CodedWire, "has_feedback", feedback):
        steps = STEPS if restart_at < 0 else restart_at + 6
        run = Run(Case(model=DeepNet, optimizer=SGD, steps=steps, dear=dear), with_dear=True)
        run.attach()
    coded_steps, plan = 0, None
    for number in range(run.case.steps):
        if number == restart_at:
            assert coded_steps > 2
            with on_nodes(layout):
                _restart(run)
            _compare_residuals(run, simulation, plan)
        step = _step(run, number)
        plan = step.plan
        own = _of_all_ranks(step.own)
        expected = {
            name: add_up([g[name] * (1 / len(own)) for g in own], NodeOrder(layout)) for name in step.own
        }  # 1-D parameters, and all in the first iterations, are dense
        if step.plan is not None:
            sparse = simulation.reduce(step.plan, own)
            coded_steps += any(not torch.equal(expected[name], value) for name, value in sparse.items())
            expected |= sparse
        assert_same(step.reduced, expected, f"step {number}")
        everywhere = _of_all_ranks(snapshot(run.model.module.state_dict()))
        for other in everywhere:
            assert_same(other, everywhere[0], f"parameters after step {number}")
    assert coded_steps > run.case.steps // 2
    if feedback:
        _compare_residuals(run, simulation, plan)
    run.detach()


def _restart(run: Run) -> None:
    """Save everything, throw it away, build it anew, and load."""
    file = io.BytesIO()
    wire = run.state.state_dict()
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer_state(), "wire": wire}, file)
    file.seek(0)
    saved = torch.load(file)
    run.build()
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.attach()
    run.state.load_state_dict(saved["wire"])


def _compare_residuals(run: Run, simulation: Simulation, plan: Any) -> None:
    state = run.state.state_dict()
    node = next(ranks for ranks in simulation.layout if run.rank in ranks)
    own_place, places = node.index(run.rank), len(node)
    seen = 0
    for group in plan.groups:
        if (run.rank, group.index) not in simulation.residuals:
            continue
        size = group.numel // places
        expected = torch.zeros(group.numel)
        expected[own_place * size : (own_place + 1) * size] = simulation.residuals[run.rank, group.index]
        for piece, low in zip(group.pieces, plan.places_of(group), strict=True):
            residual = state["residual"][plan.gradients[piece.parameter].name]
            part = residual[piece.start : piece.start + piece.numel]
            assert torch.equal(part, expected[low : low + piece.numel]), group
            seen += int(part.count_nonzero())
    assert seen > 0


@pytest.mark.parametrize(
    ("layout", "dear", "feedback"),
    [
        pytest.param(TWO_BY_TWO, {}, True, marks=pytest.mark.nightly),
        pytest.param(TWO_BY_TWO, SEVERAL_PER_GROUP, False, marks=pytest.mark.nightly),
        (INTERLEAVED, SEVERAL_PER_GROUP, True),
        (CROSSED, {"schedule": "dear"}, True),
    ],
    ids=["two_by_two", "without_feedback", "interleaved", "crossed"],
)
def test_one_process_computes_the_same(on_ranks, layout, dear, feedback) -> None:
    on_ranks(_compare_with_simulation, 4, layout, dear, DENSITY, feedback)


@pytest.mark.parametrize(
    "layout", [pytest.param(TWO_BY_TWO, marks=pytest.mark.nightly), INTERLEAVED, TWO_NODES], ids=str
)
def test_density_1_is_the_dense_sum_in_node_order(on_ranks, layout) -> None:
    case = Case(model=DeepNet, optimizer=SGD, dear={"compress": dx.TopK(1.0)})
    check_on_nodes(case, layout, on_ranks)


def test_a_resumed_run_still_owes_what_it_has_left_out(on_ranks) -> None:
    on_ranks(_compare_with_simulation, 4, INTERLEAVED, {}, DENSITY, True, 8)


# Nothing is lost.


def _sum_of_everything(layout: Layout, dear: dict[str, Any], steps: int) -> None:
    """All reduced gradients plus what all ranks still owe are the mean of all ranks' gradients, by parameter."""
    with on_nodes(layout):
        run = Run(Case(model=DeepNet, optimizer=SGD, steps=steps, dear={"groups": "node", **dear}), with_dear=True)
        run.attach()
    due: dict[str, torch.Tensor] = {}
    for step in (_step(run, number) for number in range(run.case.steps)):
        for name in step.own:
            mean = sum(own[name].double() for own in _of_all_ranks(step.own)) / world_size(layout)
            due[name] = due.get(name, 0.0) + mean - step.reduced[name].double()
        owed = _of_all_ranks(run.state.state_dict().get("residual", {}))
        for name, rest in due.items():
            of_ranks = sum((one[name].double() for one in owed if name in one), torch.zeros(rest.numel()).double())
            torch.testing.assert_close(of_ranks, rest.flatten(), rtol=1e-4, atol=1e-6)
    assert any(rest.abs().max() > 1e-3 for rest in due.values()), "nothing was left out: this shows nothing"
    run.detach()


WIRES = {
    "sparse": {"compress": dx.TopK(DENSITY)},
    "sparse_int8": {"compress": dx.TopK(DENSITY), "wire_dtype": torch.int8},
}


@pytest.mark.parametrize(
    ("wire", "layout"), [("sparse", TWO_NODES), pytest.param("sparse_int8", TWO_BY_TWO, marks=pytest.mark.nightly)]
)
def test_what_is_left_out_is_made_up_for(on_ranks, layout, wire) -> None:
    on_ranks(_sum_of_everything, world_size(layout), layout, WIRES[wire] | SEVERAL_PER_GROUP, 8)


def _coded_sums(layout: Layout) -> None:
    """Inside of a node nothing is coded: on one node the code of a sum is all that is left out."""
    with on_nodes(layout):
        run = Run(Case(model=DeepNet, optimizer=SGD, dear={"groups": "node", "wire_dtype": torch.int8}), with_dear=True)
        run.attach()
    for step in (_step(run, number) for number in range(run.case.steps)):
        own = _of_all_ranks(step.own)
        for name, value in step.reduced.items():
            mean = add_up([g[name] * (1 / len(own)) for g in own], NodeOrder(layout))
            # Two codes, each off by half a step of 127 of the largest, and residuals of as much from the step before.
            assert (value - mean).abs().max() <= 6 * mean.abs().max() / 127
        everywhere = _of_all_ranks(snapshot(run.model.module.state_dict()))
        for other in everywhere:
            assert_same(other, everywhere[0], "parameters of another rank")
    run.detach()


@pytest.mark.parametrize("layout", [pytest.param(TWO_BY_TWO, marks=pytest.mark.nightly), INTERLEAVED], ids=str)
def test_codes_across_nodes_are_close_and_the_same_everywhere(on_ranks, layout) -> None:
    on_ranks(_coded_sums, 4, layout)


def _norms(wire: dict[str, Any], own: bool) -> None:
    """Norms of shards are those of the gradients that everybody gets, also with parameters that no rank uses."""
    dear = {"groups": "node", "norms": "sharded", **wire}
    case = Case(model=SkippingNet, optimizer=SGD, ddp={"find_unused_parameters": True}, dear=dear)
    with on_nodes(INTERLEAVED):
        run = Run(case, with_dear=True)
        run.attach()
    parameters = list(run.model.parameters())
    for x, y in run.batches():
        run.optimizer.zero_grad()
        run.loss(run.model(x), y).backward()
        clip = run.state.clip_grad_norm_ if own else partial(torch.nn.utils.clip_grad_norm_, parameters)
        norm = clip(1e9)
        run.optimizer.step()
        gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
        torch.testing.assert_close(norm, torch.cat(gradients).norm(), rtol=1e-5, atol=0)
        everywhere = _of_all_ranks([norm, *map(torch.Tensor.detach, parameters)])
        for other in everywhere:
            assert_same(other, everywhere[0], "norm and parameters of another rank")
    assert run.state.stats().pipelined_iterations > case.steps // 2
    run.detach()


@pytest.mark.parametrize(("wire", "own"), [("sparse", True), ("sparse_int8", False)])
def test_norms_are_of_what_everybody_gets(on_ranks, wire, own) -> None:
    on_ranks(_norms, 4, WIRES[wire], own)
