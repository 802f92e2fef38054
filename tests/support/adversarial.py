"""One training loop twice on every rank: with plain DDP, and with ddp_crossover attached.

A loop is a test function with the decorator `adversarial`; it takes a `Script` and reads like a
user's own training script. The harness never applies anything for it: no `synchronize()`, no pause.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comparison import first_difference, snapshot
from equivalence import FIRST_AMBIGUOUS_WORLD_SIZE, SMALL_GROUPS_MB
from reference import rank_order_hook
from torch_features import HAS_COVERS

# Reasons to fall back that the documents tell of.
GRADIENTS_READ = "before optimizer.step.*their updates are not deferred"
PAST_EVERYTHING = "RuntimeError: .* by code that bypasses __torch_function__"
KEPT = "has a gradient whose memory the script keeps"
ALIASED = "shares its memory with another tensor"

SEED = 1234
STEPS = 10
# Weights are groups of their own, or a few parameters share one.
GROUP_SIZES_MB = (SMALL_GROUPS_MB, 2e-3)
TIMEOUT_S = 200.0
# Set it to compare plain DDP with itself: what differs then is the loop's own doing.
SELF_COMPARISON = "ADVERSARY_SELF"


@dataclass(frozen=True)
class Expectation:
    """What may become of a loop with ddp_crossover attached."""

    deferred: int | None = None
    """Steps, of every attached optimizer, whose update must have been deferred: a loop may not pass by falling back.
    Half of the usual number, if not given and no fallback is expected.
    """
    fallback: str | None = None
    """A regular expression for the reason why steps fall back, as documented."""
    refused: str | None = None
    """A regular expression for the documented error, `ClassName: message`."""
    strict: bool = True
    """Whether the loop is also meant to run with `strict=True`, which it does on 3 ranks."""

    @property
    def least_deferred(self) -> int:
        """`deferred` or what stands for it."""
        if self.deferred is not None:
            return self.deferred
        return 0 if self.fallback is not None else STEPS // 2


def adversarial(
    *, three: bool | None = None, needs: str = "", cases: Mapping[str, Any] | None = None, **expectation: Any
) -> Callable[..., Any]:
    """Make a test of a loop, on 2 ranks or if `three` on 3; `needs` is a package to skip without. If there are `cases`,
    the loop takes one, and each is a test of its own.

    If `three` is left out, one loop in five runs on 3 ranks.
    """

    def decorate(loop: Callable[..., None]) -> Callable[..., None]:
        on_three = zlib.crc32(loop.__name__.encode()) % 5 == 0 if three is None else three
        world_size = 3 if on_three else 2
        names: list[str | None] = [*cases] if cases else [None]
        ids = [f"{name}-{world_size}" if name else str(world_size) for name in names]

        @pytest.mark.parametrize("case", names, ids=ids)
        def test(on_ranks: Callable[..., list[Any]], case: str | None) -> None:
            if needs:
                pytest.importorskip(needs)
            if test.expectation.refused == PAST_EVERYTHING and not HAS_COVERS:
                pytest.skip("torch was built for CPUs only")
            where = (loop.__module__, loop.__name__, case)
            failures = on_ranks(compare_arms, world_size, *where, SELF_COMPARISON in os.environ, timeout_s=TIMEOUT_S)
            if any(failures):
                pytest.fail("\n".join(f"rank {r}: {each}" for r, each in enumerate(failures) if each), pytrace=False)

        test.__name__, test.__doc__, test.__module__ = loop.__name__, loop.__doc__, loop.__module__
        test.loop, test.cases, test.expectation = loop, cases, Expectation(**expectation)
        return test

    return decorate


class Script:
    """One arm of a loop: the few lines of a script that differ between the arms, and what it looks at."""

    def __init__(self, name: str, with_dear: bool, strict: bool) -> None:
        self.with_dear = with_dear
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.states: list[Any] = []
        self.seen: list[Any] = []
        choice = zlib.crc32(name.encode())  # not hash(), which differs from run to run
        self._options = {
            "fusion_mb": GROUP_SIZES_MB[choice % 2],
            "schedule": ("auto", "dear")[choice // 2 % 2],
            "strict": strict,
        }
        self._bucket_view = bool(choice // 4 % 2)
        self._models: list[DistributedDataParallel] = []
        self._optimizers: list[Any] = []

    def ddp(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """The module in DDP; its parameters, buffers and gradients are compared at the end."""
        model = DistributedDataParallel(module, **({"gradient_as_bucket_view": self._bucket_view} | options))
        self._models.append(model)
        return model

    def attach(self, model: DistributedDataParallel, *optimizers: Any, **options: Any) -> None:
        """Where the script has `dx.attach(model, optimizer)`."""
        self._optimizers += optimizers
        if self.with_dear:
            import ddp_crossover as dx

            only = optimizers[0] if len(optimizers) == 1 else list(optimizers)
            self.states.append(dx.attach(model, only, **(self._options | options)))
        elif self.world_size >= FIRST_AMBIGUOUS_WORLD_SIZE:
            model.register_comm_hook(None, rank_order_hook)

    def train(self, module: nn.Module, make_optimizer: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
        """`ddp` and `attach` in one, for one optimizer over all parameters."""
        model = self.ddp(module)
        optimizer = make_optimizer(model.parameters(), **options)
        self.attach(model, optimizer)
        return model, optimizer

    def batches(
        self, steps: int = STEPS, features: int = 8, outputs: int = 4
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets, different on every rank and of different size."""
        for step in range(steps):
            generator = torch.Generator().manual_seed(1000 * step + self.rank)
            size = 4 + self.rank
            yield (
                torch.randn(size, features, generator=generator),
                torch.randn(size, outputs, generator=generator),
            )

    def log(self, *values: Any) -> None:
        """Something that the script looks at: it is compared with the other arm's."""
        self.seen.append(snapshot(list(values)))

    def result(self) -> dict[str, Any]:
        """All that can be seen at the end."""
        return snapshot(
            {
                "logged": self.seen,
                "models": [model.module.state_dict() for model in self._models],
                "gradients": [{n: p.grad for n, p in model.named_parameters()} for model in self._models],
                "frozen": [{n: p.requires_grad for n, p in model.named_parameters()} for model in self._models],
                "optimizers": [o.state_dict() for o in self._optimizers if hasattr(o, "state_dict")],
                "torch's generator": torch.get_rng_state(),
                "numpy's generator": np.random.get_state(),
                "python's generator": random.getstate(),
            }
        )

    def detach(self) -> None:
        """The script goes back to plain DDP."""
        for state in self.states:
            state.detach()

    def parameters(self) -> Any:
        """Of all models, as they are now."""
        return snapshot([list(model.parameters()) for model in self._models])


def compare_arms(module: str, name: str, case: str | None, alone: bool) -> str | None:
    """On every rank: both arms of the loop `name`, and why what became of it is not as expected.

    It raises nothing, so that the ranks live on for the next loop.
    """
    test = getattr(importlib.import_module(module), name)
    expectation: Expectation = Expectation(deferred=0) if alone else test.expectation
    strict = expectation.strict and dist.get_world_size() >= FIRST_AMBIGUOUS_WORLD_SIZE
    loop = test.loop if case is None else partial(test.loop, case=test.cases[case])
    expected = _run(loop, name + (case or ""), with_dear=False, strict=False)
    seen = _run(loop, name + (case or ""), with_dear=not alone, strict=strict)
    fallbacks = {reason: count for each in seen.stats for reason, count in each.fallbacks.items()}
    deferred = [each.deferred_steps for each in seen.stats]
    return _failure(expectation, expected, seen, fallbacks, deferred)


def _failure(
    expectation: Expectation, expected: _Arm, seen: _Arm, fallbacks: dict[str, int], deferred: list[int]
) -> str | None:
    if expected.error is not None:
        return f"the loop is wrong by itself: {expected.error}"
    if expectation.refused:
        fits = seen.error and re.search(expectation.refused, seen.error)
        return None if fits else f"not refused as expected: {seen.error}"
    if seen.error is not None:
        return f"only with ddp_crossover: {seen.error}"
    if difference := first_difference(seen.result, expected.result):
        return f"differs from plain DDP: {difference}"
    if not seen.warnings <= expected.warnings:
        return f"warns of {sorted(seen.warnings - expected.warnings)}"
    if expectation.fallback is None and fallbacks:
        return f"fell back: {fallbacks}"
    if expectation.fallback and not re.search(expectation.fallback, " ".join(fallbacks)):
        return f"other reasons to fall back than expected: {fallbacks}"
    if any(count < expectation.least_deferred for count in deferred):
        return f"steps deferred: {deferred} of {[each.iterations for each in seen.stats]}"
    return None


@dataclass
class _Arm:
    result: Any = None
    error: str | None = None
    stats: Any = ()
    warnings: frozenset[str] = frozenset()


def _run(loop: Callable[..., None], name: str, with_dear: bool, strict: bool) -> _Arm:
    script = Script(name, with_dear, strict)
    # Of each rank's own, as scripts do that want different noise; DDP makes the weights equal.
    random.seed(SEED + script.rank)
    np.random.seed(SEED + script.rank)
    torch.manual_seed(SEED + script.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loop(script)
            result = script.result()
            stats = [state.stats() for state in script.states]
            script.detach()
            result["parameters after detach()"] = script.parameters()
        except Exception as error:
            script.detach()
            frames = traceback.extract_tb(error.__traceback__)[2:]
            way = " > ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames)
            return _Arm(error=f"{type(error).__name__}: {error} ({way})")
    seen = frozenset(str(each.message) for each in caught if not issubclass(each.category, DeprecationWarning))
    return _Arm(result, None, stats, seen)
