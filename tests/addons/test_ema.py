"""`dx.Ema` has the bits of torch's `AveragedModel`, and updates stay deferred.

The fuzzer draws it beside all else (`average=own`), and looks at it in the end.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradient_loops as loops
from equivalence import ADAMW, SGD, Case, Run, assert_same, check_case, run_arm, snapshot, train_step
from models import INPUTS, OUTPUTS

DECAY = 0.9


class NormNet(nn.Module):
    """Has buffers of two dtypes, a frozen parameter, a bf16 one, and a branch that not every forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 7)
        self.norm = nn.BatchNorm1d(7)
        self.branch = nn.Linear(7, 7)
        self.last = nn.Linear(7, OUTPUTS)
        self.narrow = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((7,), 0.5), requires_grad=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        x = self.norm(self.first(x)) * self.narrow.float() + self.frozen
        return self.last(torch.tanh(self.branch(x) if self.calls % 3 == 1 else x))


class Average:
    """AveragedModel in plain DDP's arm, Ema in DeAR's."""

    def __init__(self, run: Run, **options: Any) -> None:
        self.is_ours = run.with_dear
        self.run = run
        if not run.attached:
            run.attach()
        if self.is_ours:
            import ddp_crossover as dx

            self.model: AveragedModel = dx.Ema(run.state, DECAY, **options)
        else:
            self.model = AveragedModel(run.model.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY), **options)

    def step_ended(self) -> None:
        if not self.is_ours:
            self.model.update_parameters(self.run.model.module)


def average(run: Run, looks: str = "never", **options: Any) -> Iterator[Any]:
    mean = Average(run, **options)
    kept = mean.model.module
    x_eval, _ = run.batch(10_000)
    for index, (x, y) in enumerate(run.batches()):
        for each in run.optimizers:
            each.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        for each in run.optimizers:
            each.step()
        mean.step_ended()
        seen: Any = None
        if looks == "state_dict" and index % 3 == 1:
            seen = snapshot(mean.model.state_dict())
        elif looks == "module" and index % 3 == 1:
            kept.eval()
            with torch.no_grad():
                seen = kept(x_eval)
            kept.train()
        elif looks == "one" and index % 2:
            seen = snapshot(list(kept.parameters())[2])
        elif looks == "copy" and index % 3 == 1:
            seen = snapshot(copy.deepcopy(mean.model).state_dict()) if index % 2 else copy.deepcopy(kept).state_dict()
        elif looks == "write" and index == 6:
            with torch.no_grad():
                kept.last.weight.mul_(0.5)
        yield loss, seen
    yield snapshot(mean.model.state_dict())


LOOKS = ["never", "state_dict", "module", "one", "copy", "write"]


def compare_averages(case: Case, deferred_at_least: int) -> None:
    expected, expected_state, _ = run_arm(case, with_dear=False)
    seen, seen_state, stats = run_arm(case, with_dear=True)
    for step, observed in expected.items():
        assert_same(seen[step], observed, f"step {step}")
    assert_same(seen_state, expected_state, "at the end")
    assert stats.deferred_steps >= deferred_at_least, stats
    if deferred_at_least:
        # A look right after step() is one of this test's own.
        assert sum(stats.looks.values()) <= 1 + sum(bool(v[1] is not None) for v in list(seen.values())[:-1])


@pytest.mark.quick
@pytest.mark.parametrize("use_buffers", [False, True], ids=["buffers_copied", "buffers_averaged"])
def test_it_has_the_bits_of_an_averaged_model(on_ranks, use_buffers) -> None:
    case = Case(partial(average, use_buffers=use_buffers), model=NormNet, ddp={"find_unused_parameters": True})
    on_ranks(compare_averages, 2, case, 4)


@pytest.mark.parametrize(("looks", "strict"), [(one, number % 2 == 0) for number, one in enumerate(LOOKS)])
def test_averages_that_are_read_are_up_to_date(on_ranks, looks, strict) -> None:
    case = Case(
        partial(average, looks=looks), model=NormNet, strict=strict, steps=16, ddp={"find_unused_parameters": True}
    )
    on_ranks(compare_averages, 2, case, 8 if looks != "write" else 0)


def scale_loss(run: Run) -> Iterator[Any]:
    """The plain arm averages after the steps that its scaler has not skipped."""
    mean = Average(run)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=50)
    for index, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        loss = loops.inject_inf(run, index, run.loss(run.model(x), y))
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(run.optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            mean.step_ended()
        yield loss, None
    yield snapshot(mean.model.state_dict())


@pytest.mark.parametrize("norms", ["exact", "sharded"])
def test_skipped_steps_do_not_count(on_ranks, norms) -> None:
    on_ranks(compare_averages, 2, Case(scale_loss, optimizer=SGD, steps=20, dear={"norms": norms}), 0)


def resume(run: Run) -> Iterator[Any]:
    """Half of the run, then everything anew from what was saved between `step()` and the next forward."""
    mean = Average(run, use_buffers=True)
    for index in range(2 * run.case.steps):
        if index == run.case.steps:
            saved = snapshot([run.model.module.state_dict(), run.optimizer.state_dict(), mean.model.state_dict()])
            run.build()
            mean = Average(run, use_buffers=True)
            for part, state in zip((run.model.module, run.optimizer, mean.model), saved, strict=True):
                part.load_state_dict(state)
        loss = train_step(run, *run.batch(index))
        mean.step_ended()
        yield loss, None
    yield snapshot(mean.model.state_dict())


def test_it_resumes(on_ranks) -> None:
    on_ranks(compare_averages, 2, Case(resume, model=NormNet, ddp={"find_unused_parameters": True}), 0)


def keep_the_module(run: Run) -> Iterator[Any]:
    """As a function that trains, and returns the averaged network only."""
    mean = Average(run)
    for x, y in run.batches():
        loss = train_step(run, x, y)
        mean.step_ended()
        yield loss, None
    kept = mean.model.module
    del mean
    gc.collect()
    yield snapshot(kept.state_dict())


def test_the_last_step_is_averaged_in_a_module_that_outlives_it(on_ranks) -> None:
    check_case(Case(keep_the_module), on_ranks)


def drop_while_pending() -> None:
    import ddp_crossover as dx

    run = Run(Case(steps=10), with_dear=True)
    run.attach()
    ema = dx.Ema(run.state)
    average = weakref.ref(next(ema.parameters()))
    for x, y in run.batches():
        train_step(run, x, y)
    updates = run.state._updates.after_update
    del ema
    train_step(run, x, y)
    gc.collect()
    assert not updates
    assert average() is None


def test_nothing_is_left_of_an_average_that_was_dropped_while_pending(on_ranks) -> None:
    on_ranks(drop_while_pending, 1)


def misuse() -> list[str]:
    import ddp_crossover as dx

    run = Run(Case(optimizer=ADAMW), with_dear=True)
    errors = []
    for wrong in (run.model, run.model.module):
        with pytest.raises(TypeError) as caught:
            dx.Ema(wrong)
        errors.append(str(caught.value))
    run.attach()
    with pytest.raises(ValueError) as out_of_range:
        dx.Ema(run.state, decay=2.0)
    ema = dx.Ema(run.model)
    with pytest.raises(RuntimeError) as by_hand:
        ema.update_parameters(run.model)
    errors += [str(out_of_range.value), str(by_hand.value)]
    updates = run.state._updates.after_update
    assert updates
    del ema, by_hand  # whose traceback has it
    gc.collect()
    assert not updates  # it is gone
    run.detach()
    return errors


def test_misuse_is_an_error_that_says_what_to_do(on_ranks) -> None:
    [errors] = on_ranks(misuse, 1)
    for error, says in zip(errors, ("attach", "attach", "between 0 and 1", "remove this call"), strict=True):
        assert says in error
