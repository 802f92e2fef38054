"""Legs with a round inside of each node: bit for bit DDP with a hook that adds up inside of nodes in rank order, then
over nodes in the order of their lowest ranks (`node_groups.node_order_hook`); DDP as it is where sums have one order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradient_loops
import loops
from equivalence import SGD, Case, Run, assert_same, check_case, compare_arms, snapshot
from models import DeepNet, MixedDtypeNet, OddNet
from node_groups import (
    CROSSED,
    INTERLEAVED,
    ONE_NODE,
    THREE_NODES,
    THREE_ON_ONE,
    TWO_BY_TWO,
    TWO_NODES,
    Layout,
    NodeOrder,
    add_up,
    check_on_nodes,
    node_order_hook,
    on_nodes,
    world_size,
)
from wirings import SkippingNet

LAYOUTS = {
    "two_by_two": TWO_BY_TWO,
    "interleaved": INTERLEAVED,
    "crossed": CROSSED,
    "two_nodes": TWO_NODES,
    "one_node": ONE_NODE,
    "three_nodes": THREE_NODES,
    "three_on_one": THREE_ON_ONE,
}
QUICK = ("two_by_two", "interleaved", "crossed")  # in the last two, slices have other numbers than their ranks
BUCKET_VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
BF16 = {"wire_dtype": torch.bfloat16}
SHARDED = {"norms": "sharded"}

CASES = {
    "bucket_views": Case(model=DeepNet, optimizer=SGD, ddp=BUCKET_VIEWS, strict=False),
    "small_buckets": Case(model=DeepNet, optimizer=SGD, ddp={"bucket_cap_mb": 1e-4}),
    "no_sync": Case(loops.accumulate_with_no_sync),
    "unused": Case(model=SkippingNet, optimizer=SGD, ddp=UNUSED, pipelined=False),
    "fp64": Case(model=partial(MixedDtypeNet, torch.float64), optimizer=SGD),
    "stock_scaler": Case(gradient_loops.scaler, pipelined=False),
    "bf16": Case(dear=BF16),
    # Norms come from squares of shards, whose sums have another order than those of whole gradients.
    "own_clipping": Case(gradient_loops.clip_norm_on_shards, optimizer=SGD, exact=False),
    "sharded_clipping": Case(gradient_loops.clip_norm, optimizer=SGD, dear=SHARDED, exact=False),
    "sharded_scaler": Case(partial(gradient_loops.scaler, clip=True), optimizer=SGD, dear=SHARDED, exact=False),
    "own_scaler": Case(partial(gradient_loops.scaler, own=True), optimizer=SGD),
    # The largest element is the same in whatever order it is looked for.
    "largest_of_shards": Case(
        partial(gradient_loops.clip_norm_on_shards, norm_type=float("inf")),
        model=partial(OddNet, empty_parameter=False),
        optimizer=SGD,
    ),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.quick) if name in QUICK else name for name in LAYOUTS]
)
def test_each_arrangement_of_ranks_is_exact(on_ranks, layout) -> None:
    check_on_nodes(Case(), LAYOUTS[layout], on_ranks)


@pytest.mark.parametrize("name", CASES)
def test_each_way_to_train_is_exact(on_ranks, name) -> None:
    layout = (TWO_BY_TWO, CROSSED, INTERLEAVED)[list(CASES).index(name) % 3]
    # In the last one, slices have the numbers of their ranks, which hides who mistakes one for the other.
    check_on_nodes(CASES[name], TWO_BY_TWO if "clipping" in name else layout, on_ranks)


def test_detach_leaves_plain_ddp(on_ranks) -> None:
    case = Case(loops.detach_halfway, optimizer=SGD, pipelined=False)
    check_on_nodes(case, ONE_NODE, on_ranks)  # the sums of two ranks have one order


def test_the_tuner_may_change_plans(on_ranks) -> None:
    case = Case(model=DeepNet, optimizer=SGD, dear={"fusion_mb": None}, steps=40, pipelined=False)
    check_on_nodes(case, INTERLEAVED, on_ranks)


# Against plain DDP itself.


def _steps_from_equal_parameters(layout: Layout) -> None:
    """In each step both begin with the same parameters, so that differences do not add up."""
    with on_nodes(layout):
        case = Case(model=DeepNet, optimizer=SGD, dear={"groups": "node"})
        run, plain = Run(case, with_dear=True), Run(case, with_dear=False)
        plain.attached = True  # nothing: DDP as it is
        differs = False
        for x, y in run.batches():
            plain.model.module.load_state_dict(snapshot(run.model.module.state_dict()))
            gradients = []
            for one in (run, plain):
                one.optimizer.zero_grad()
                one.loss(one.model(x), y).backward()
                gradients.append(snapshot([p.grad for p in one.model.parameters()]))
                one.optimizer.step()
            assert_same(*gradients, "gradients", rtol=1e-6, atol=1e-8)
            differs |= any(not torch.equal(*pair) for pair in zip(*gradients, strict=True))
            everywhere: list[Any] = [None] * run.model._get_ddp_logging_data()["world_size"]
            dist.all_gather_object(everywhere, [p.detach().clone() for p in run.model.module.parameters()])
            for other in everywhere:
                assert_same(other, everywhere[0], "parameters of another rank")
        assert differs, "gloo's ring adds up in the same order: a wrong order would not show"
        run.detach()


@pytest.mark.parametrize("layout", [TWO_BY_TWO, INTERLEAVED], ids=["two_by_two", "interleaved"])
def test_steps_are_those_of_plain_ddp_but_for_rounding(on_ranks, layout) -> None:
    on_ranks(_steps_from_equal_parameters, 4, layout)


# The yardstick, and that it can tell orders apart.


def _add_up(layout: Layout) -> float:
    gradient = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])[dist.get_rank()]

    class Bucket:
        def buffer(self) -> torch.Tensor:
            return gradient * 4

    return float(node_order_hook(NodeOrder(layout), Bucket()).value())


@pytest.mark.parametrize(("layout", "expected"), [(TWO_BY_TWO, 0.0), (INTERLEAVED, 2.0), (CROSSED, 0.0)])
def test_the_reference_hook_adds_up_inside_of_nodes_first(on_ranks, layout, expected) -> None:
    assert on_ranks(_add_up, 4, layout) == [expected] * 4


def test_the_order_of_sums_shows_in_training(on_ranks) -> None:
    """A case whose reference adds up in the order of another arrangement must not pass."""
    case = Case(dear={"groups": "node"}, reference=(NodeOrder(TWO_BY_TWO), node_order_hook))
    with pytest.raises(AssertionError, match="are not equal"):
        on_ranks(_compare_with_wrong_order, 4, case)


def _compare_with_wrong_order(case: Case) -> None:
    with on_nodes(INTERLEAVED):
        compare_arms(case)


def test_16_bit_sums_are_rounded_once_on_each_node() -> None:
    terms = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 0.0)]
    order = NodeOrder(TWO_BY_TWO, torch.bfloat16)
    assert add_up(terms, order).item() == 256.0  # 256 + 1 is 256 in bf16, and so is 256 + 1 again
    assert add_up(terms, order._replace(layout=((0, 1, 2, 3),))).item() == 258.0


def test_without_groups_the_nodes_do_not_matter(on_ranks) -> None:
    on_ranks(_compare_without_groups, 4)


def _compare_without_groups() -> None:
    with on_nodes(INTERLEAVED):
        compare_arms(Case())


def test_hosts_are_nodes_where_torchrun_does_not_say(on_ranks) -> None:
    """All ranks of these tests are on one host: one node of three ranks, whose sums are in rank order."""
    case = replace(Case(dear={"groups": "node"}), world_size=3)
    check_case(case, on_ranks)
    assert world_size(THREE_ON_ONE) == case.world_size
