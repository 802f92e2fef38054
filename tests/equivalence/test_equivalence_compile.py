"""torch.compile of blocks, of the module, of its forward and of the DDP object.

Mostly with the backends "eager" and "aot_eager", which trace as the real one does but compile nothing: what they would
generate makes no difference to hooks and parameters, and takes seconds a graph. Nothing may be compiled that plain DDP
does not compile.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch._inductor import config as inductor_config

import compiled_models as compiled
import compiled_optimizers
from equivalence import Case, Run, check_case, compare_arms
from matrix import often

AOT = {"backend": "aot_eager"}
BLOCKS = partial(compiled.build, compiled.blocks, **AOT)
MODULE = partial(compiled.build, compiled.module, **AOT)
NOT_YET = partial(compiled.build, compiled.not_yet)
ALL_AT_ONCE = partial(compiled.loop, change_sizes=True, accumulate=True, evaluate=True)

WAYS = {
    way.__name__: Case(ALL_AT_ONCE, model=partial(compiled.build, way, **AOT))
    for way in (
        *(compiled.blocks, compiled.blocks_in_place, compiled.module, compiled.module_in_place),
        *(compiled.forward_method, compiled.forward_methods_of_blocks, compiled.decorated_forward),
    )
}
WAYS |= {
    f"ddp_{when.replace(' ', '_')}": Case(partial(ALL_AT_ONCE, ddp=when, **AOT), model=NOT_YET)
    for when in ("before", "after", "in place")
}
OPTIONS = {
    "fullgraph": Case(compiled.loop, model=partial(MODULE, fullgraph=True)),
    "dynamic": Case(partial(compiled.loop, change_sizes=True), model=partial(MODULE, dynamic=True)),
    "blocks_eager": Case(compiled.loop, model=partial(compiled.build, compiled.blocks, backend="eager")),
    "ddp_eager": Case(partial(compiled.loop, ddp="after", backend="eager"), model=NOT_YET),
    "ddp_one_graph": Case(partial(compiled.loop, ddp="after", optimize_ddp=False, **AOT), model=NOT_YET),
    "ddp_find_unused": Case(
        partial(compiled.loop, ddp="after", **AOT), model=NOT_YET, ddp={"find_unused_parameters": True}
    ),
    "ddp_static_graph": Case(partial(compiled.loop, ddp="after", **AOT), model=NOT_YET, ddp={"static_graph": True}),
    "blocks_static_graph": Case(compiled.loop, model=BLOCKS, ddp={"static_graph": True}),
}
OPTIMIZERS = {
    "deferred": Case(compiled_optimizers.reset_loop, optimizer=compiled_optimizers.compiled_momentum, pipelined=False),
    "not_deferred": Case(
        compiled_optimizers.reset_loop, optimizer=compiled_optimizers.with_something_of_its_own, pipelined=False
    ),
    "step": Case(compiled_optimizers.compiled_step, pipelined=False),
    "clipping": Case(compiled_optimizers.compiled_clipping, pipelined=False),
}
INDUCTOR = {
    "module": Case(compiled.loop, model=partial(compiled.build, compiled.module)),
    "forward": Case(compiled.loop, model=partial(compiled.build, compiled.forward_method)),
    "reduce_overhead": Case(compiled.loop, model=partial(compiled.build, compiled.module, mode="reduce-overhead")),
    "ddp": Case(partial(compiled.loop, ddp="after"), model=NOT_YET),
}


@pytest.mark.parametrize("way", often(WAYS, "blocks", "module_in_place", "decorated_forward", "ddp_after"))
def test_a_compiled_model_is_exact_and_compiled_as_often(on_ranks, way: str) -> None:
    strict = list(WAYS).index(way) % 2 == 0
    check_case(replace(WAYS[way], strict=strict), on_ranks)


@pytest.mark.parametrize("way", often(["blocks_in_place", "ddp_after"], "blocks_in_place"))
def test_a_compiled_model_is_exact_on_one_rank(on_ranks, way: str) -> None:
    check_case(replace(WAYS[way], world_size=1), on_ranks)


@pytest.mark.parametrize("name", often(OPTIONS, "fullgraph"))
def test_options_of_the_compiler_and_of_ddp_keep_it_exact(on_ranks, name: str) -> None:
    check_case(OPTIONS[name], on_ranks)


@pytest.mark.parametrize("name", often(OPTIMIZERS, "deferred"))
def test_compiled_updates_are_exact(on_ranks, name: str) -> None:
    check_case(OPTIMIZERS[name], on_ranks)


def _say_why_updates_come_first(run: Run) -> Iterator[Any]:
    for index, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        repeats = 1 + index % 5  # another size, another compilation
        loss = run.loss(run.model(x.repeat(repeats, 1)), y.repeat(repeats, 1))
        loss.backward()
        run.optimizer.step()
        yield loss
    if run.with_dear:
        assert any("forward calls a compiled function" in why for why in run.state.stats().fallbacks)


def test_a_compiled_function_in_forward_is_exact_and_named(on_ranks) -> None:
    model = partial(compiled.build, compiled.function, **AOT)
    check_case(Case(_say_why_updates_come_first, model=model, steps=12, pipelined=False), on_ranks)


def _compare_with_inductor(case: Case) -> None:
    with inductor_config.patch(compile_threads=1):  # no processes that outlive the test
        compare_arms(case)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ to compile for CPUs")
@pytest.mark.parametrize("name", often(INDUCTOR, "module"))
def test_inductor_draws_the_same_random_numbers_from_the_first_forward_on(on_ranks, name: str) -> None:
    on_ranks(_compare_with_inductor, 2, INDUCTOR[name], timeout_s=300)
