"""torch.compile of blocks, of the module and of the DDP wrapper.

With the backends "eager" and "aot_eager", which trace as the real one does but compile nothing:
what they would generate makes no difference to hooks and parameters, and takes seconds a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from equivalence import Case, Run, check_case
from matrix import spread
from models import DeepNet
from wirings import CompiledBlocksNet


def compiled_loop(run: Run, backend: str) -> Iterator[Any]:
    """`torch.compile(ddp)`, with an evaluation between steps."""
    torch.compiler.reset()
    run.attach()
    model = torch.compile(run.model, backend=backend)
    x_eval, _ = run.batch(10_000)
    for x, y in run.batches():
        run.optimizer.zero_grad()
        loss = run.loss(model(x), y)
        loss.backward()
        run.optimizer.step()
        with torch.no_grad():
            yield loss, model(x_eval)


def compiled_module() -> torch.nn.Module:
    """`DDP(torch.compile(module))`."""
    torch.compiler.reset()
    return torch.compile(DeepNet(), backend="aot_eager")


COMPILED = {
    "blocks_aot_eager": Case(model=partial(CompiledBlocksNet, "aot_eager")),
    "module": Case(model=compiled_module),
    "ddp_eager": Case(partial(compiled_loop, backend="eager")),
    "ddp_aot_eager": Case(partial(compiled_loop, backend="aot_eager"), model=DeepNet),
}


@pytest.mark.parametrize("case", spread(COMPILED, world_sizes=(1, 2)))
def test_compiled_model_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)
