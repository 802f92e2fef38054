"""What codes leave out, in training loops that are not a tutorial's."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ddp_crossover as dx
from coded_runs import ADAM, SGD, Coded, Training, assert_same, everywhere, loss_of
from wire_reference import OneProcess

OnRanks = Callable[..., list[Any]]
INT8: dict[str, Any] = {"wire_dtype": torch.int8}
SPARSE_INT8: dict[str, Any] = {"compress": dx.TopK(0.05)} | INT8
WARM = dx.TopK(0.02, warmup=[(6, 0.5), (3, 0.2)])
WIRES = {"int8": INT8, "sparse": SPARSE_INT8, "warm-up": {"compress": WARM}}


def residual(run: Training) -> dict[str, Tensor]:
    return run.state.state_dict()["residual"]


# What is not finite.


def _overflows_on_one_rank(wire: dict[str, Any]) -> None:
    rank = dist.get_rank()
    run = Training(Coded(wire))
    reference = run.reference()

    def both(step: int) -> None:
        run.step(step)
        reference.step([partial(loss_of, step, one) for one in range(2)], run.state.plan)
        assert_same(run.parameters(), reference.parameters(), f"step {step}")

    for step in range(6):
        both(step)
    before = copy.deepcopy(run.left_out())
    run.optimizer.zero_grad()
    loss = loss_of(6, rank, run.model)
    (loss * torch.inf if rank == 1 else loss).backward()
    spoilt = [name for name, p in run.model.module.named_parameters() if not p.grad.isfinite().all()]
    assert "middle.weight" in spoilt and "norm.bias" in spoilt
    assert all(names == spoilt for names in everywhere(spoilt))
    after = run.left_out()
    assert after["steps"] == before["steps"]
    assert_same(after["residual"], before["residual"], "residual")
    # The script leaves the step out. The next ones are as if it had never been.
    for step in range(7, 10):
        both(step)


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_not_finite_reaches_every_rank_and_goes_again(on_ranks: OnRanks, wire: str) -> None:
    on_ranks(_overflows_on_one_rank, 2, WIRES[wire])


def _broken_backward(wire: dict[str, Any], bad: float) -> None:
    """A backward that raises on all ranks, after some of its codes are on the way."""
    rank = dist.get_rank()
    run = Training(Coded(wire, ddp={"bucket_cap_mb": 1e-4}))
    for step in range(6):
        run.step(step)
    before = copy.deepcopy(run.left_out())

    def stop(gradient: Tensor) -> Tensor:
        raise KeyError("the script's own error")

    run.optimizer.zero_grad()
    run.model.module.first.weight.register_hook(stop)
    with pytest.raises(KeyError):
        (loss_of(50, rank, run.model) * bad).backward()
    with pytest.raises(RuntimeError, match=r"call state\.detach\(\) first"):
        run.left_out()
    run.state.detach()
    after = run.left_out()
    assert after["steps"] == before["steps"]
    assert_same(after["residual"], before["residual"], "residual")
    # A new state over a new DDP goes on from there.
    saved = {"model": run.model.module.state_dict(), "optimizer": run.optimizer.state_dict(), "wire": after}
    again = _resumed(Coded(wire), saved)
    for step in range(6, 11):
        again.step(step)
    assert all(p.isfinite().all() for p in again.parameters().values())
    assert again.left_out()["steps"] > after["steps"]


@pytest.mark.parametrize(("wire", "bad"), [("int8", torch.nan), ("sparse", 1.0), ("warm-up", 1.0)])
def test_a_backward_that_raises_changes_nothing(on_ranks: OnRanks, wire: str, bad: float) -> None:
    on_ranks(_broken_backward, 2, WIRES[wire], bad)


# Checkpoints.


def _checkpoint(run: Training) -> dict[str, Any]:
    return copy.deepcopy(
        {"model": run.model.module.state_dict(), "optimizer": run.optimizer.state_dict(), "wire": run.left_out()}
    )


def _resumed(case: Coded, saved: dict[str, Any]) -> Training:
    run = Training(case)
    run.model.module.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    run.state.load_state_dict(saved["wire"])
    return run


def _save_and_resume(case: Coded) -> None:
    run = Training(case)
    for step in range(7):
        run.step(step)
    saved = _checkpoint(run)
    for step in range(7, 14):
        run.step(step)
    expected, left_out = run.parameters(), run.left_out()

    # The first steps of a run are not coded. So the state is loaded into a run that has begun.
    other = Training(case)
    for step in range(5):
        other.step(step + 100)
    other.model.module.load_state_dict(saved["model"])
    other.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    other.state.load_state_dict(saved["wire"])
    for step in range(7, 14):
        other.step(step)
    assert_same(other.parameters(), expected, "resumed")
    again = other.left_out()
    assert again["steps"] == left_out["steps"]
    assert_same(again["residual"], left_out["residual"], "residual")

    # Loaded at the start, it is what the first coded step has, and what is saved before it.
    fresh = _resumed(case, saved)
    reference = OneProcess(fresh.at_start, case.optimizer, case.wire(), 2)
    reference.model.load_state_dict(saved["model"])
    reference.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    wires = everywhere(saved["wire"])
    reference.ranks.residual = [copy.deepcopy(one["residual"]) for one in wires]
    reference.ranks.steps = saved["wire"]["steps"]
    for step in range(7, 15):
        same = fresh.left_out()
        if fresh.state.plan is None:
            assert_same(same["residual"], saved["wire"]["residual"], f"residual in step {step}")
            assert same["steps"] == saved["wire"]["steps"]
        fresh.step(step)
        reference.step([partial(loss_of, step, one) for one in range(2)], fresh.state.plan)
        assert_same(fresh.parameters(), reference.parameters(), f"step {step}")
    assert fresh.left_out()["steps"] > saved["wire"]["steps"]


@pytest.mark.parametrize("wire", WIRES)
def test_runs_that_are_resumed_repeat_bit_for_bit(on_ranks: OnRanks, wire: str) -> None:
    on_ranks(_save_and_resume, 2, Coded(WIRES[wire], SGD if wire == "warm-up" else ADAM))


def _refused_states() -> None:
    rank = dist.get_rank()
    run = Training(Coded(INT8))
    for step in range(5):
        run.step(step)
    good = copy.deepcopy(run.left_out())
    with pytest.raises(ValueError, match="save one file for each rank"):
        run.state.load_state_dict(good | {"rank": 1 - rank})
    other = copy.deepcopy(good)
    other["residual"]["middle.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"another model.*middle\.weight"):
        run.state.load_state_dict(other)
    other = copy.deepcopy(good)
    other["residual"]["no.such"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"another model.*no\.such"):
        run.state.load_state_dict(other)
    assert_same(residual(run), good["residual"], "after refusals")
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        run.state.load_state_dict(good | {"world_size": 5, "rank": 4})
    assert ("saved by 5 ranks, and there are 2: it is dropped" in said.getvalue()) == (rank == 0)
    assert_same(residual(run), good["residual"], "after another world size")


def test_states_that_do_not_fit(on_ranks: OnRanks) -> None:
    on_ranks(_refused_states, 2)


# Habits of scripts.


def _synchronizing(run: Training, step: int) -> None:
    run.backward(step)
    run.state.synchronize()
    run.optimizer.step()
    run.state.synchronize()


def _reading_gradients(run: Training, step: int) -> None:
    run.backward(step)
    norms = [float(p.grad.norm()) for p in run.model.parameters()]
    run.optimizer.step()
    assert norms == [float(p.grad.norm()) for p in run.model.parameters()]
    assert norms == everywhere(norms)[1 - dist.get_rank()]


def _evaluating(run: Training, step: int) -> None:
    run.backward(step)
    with torch.no_grad():
        loss_of(step, 0, run.model)
    run.optimizer.step()
    with torch.inference_mode():
        loss_of(step, 1, run.model)


def _zeroing(run: Training, step: int) -> None:
    run.optimizer.zero_grad(set_to_none=False)
    loss_of(step, dist.get_rank(), run.model).backward()
    run.optimizer.step()
    run.model.zero_grad(set_to_none=False)


def _with_a_closure(run: Training, step: int) -> None:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = loss_of(step, dist.get_rank(), run.model)
        loss.backward()
        return loss

    assert run.optimizer.step(closure) is not None


def _saving_at_odd_times(run: Training, step: int) -> None:
    """`state_dict()` between all lines of the loop, and on one rank only."""
    run.optimizer.zero_grad()
    run.left_out()
    loss = loss_of(step, dist.get_rank(), run.model)
    run.left_out()
    loss.backward()
    assert_same(run.left_out()["residual"], run.left_out()["residual"], "residual")
    run.optimizer.step()
    if dist.get_rank() == 0:
        run.left_out()


HABITS = (_synchronizing, _reading_gradients, _evaluating, _zeroing, _with_a_closure, _saving_at_odd_times)


def _same_as_without(wire: dict[str, Any], views: bool, looks: bool) -> None:
    """A loop that does more than the tutorial's, in each step something else, and gets the same parameters."""
    expected, run = Training(Coded(wire)), Training(Coded(wire, ddp={"gradient_as_bucket_view": views}))
    for step in range(4 + 2 * len(HABITS)):  # the pipeline starts with the fourth
        habit = HABITS[step % len(HABITS)]
        expected.step(step)
        habit(run, step)
        if looks:
            assert_same(run.parameters(), expected.parameters(), habit.__name__)
    assert run.state.plan is not None
    assert_same(run.parameters(), expected.parameters(), "parameters")
    assert_same(residual(run), residual(expected), "residual")


# Where nobody looks, updates are pending between two habits.
@pytest.mark.parametrize(
    ("wire", "views", "looks"), [("int8", False, True), ("sparse", True, True), ("warm-up", False, False)]
)
def test_habits_change_nothing(on_ranks: OnRanks, wire: str, views: bool, looks: bool) -> None:
    on_ranks(_same_as_without, 2, WIRES[wire], views, looks)


# Loss scaling.


def _scaled(wire: dict[str, Any], make: Callable[..., Any], norms: str) -> None:
    """The same training with a scaler whose scale grows every three steps, and is halved in one that overflows."""
    rank = dist.get_rank()
    run, expected = Training(Coded(wire | {"norms": norms})), Training(Coded(wire | {"norms": norms}))
    scaler = make("cpu", init_scale=2.0**10, growth_interval=3)
    scales = set()
    for step in range(14):
        run.optimizer.zero_grad()
        loss = loss_of(step, rank, run.model)
        if overflows := step == 8:
            loss = loss * (torch.inf if rank else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        scales.add(scaler.get_scale())
        if not overflows:
            expected.step(step)
        # Powers of two change no rounding.
        assert_same(run.parameters(), expected.parameters(), f"step {step}")
    assert len(scales) == 3
    left_out = run.left_out()
    unscaled = {name: one / left_out["scale"] for name, one in left_out["residual"].items()}
    assert_same(unscaled, residual(expected), "residual")


@pytest.mark.parametrize(
    ("wire", "make", "norms"),
    [
        ("int8", torch.amp.GradScaler, "exact"),
        ("int8", dx.GradScaler, "sharded"),
        ("sparse", dx.GradScaler, "exact"),
        ("warm-up", torch.amp.GradScaler, "sharded"),
    ],
)
def test_loss_scaling(on_ranks: OnRanks, wire: str, make: Callable[..., Any], norms: str) -> None:
    on_ranks(_scaled, 2, WIRES[wire], make, norms)


def _scaled_without_data(wire: dict[str, Any]) -> None:
    """What a rank without data sends again is in the units of the others' gradients."""
    rank = dist.get_rank()
    run, expected = (Training(Coded(wire | {"weighted": True})) for _ in range(2))
    scaler = dx.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step in range(16):
        has_data = step not in (1, 7, 10, 11) or rank != step % 2
        for one in (run, expected):
            one.optimizer.zero_grad()
            with one.state.batch(3 if has_data else 0):
                if has_data:
                    loss = loss_of(step, rank, one.model)
                    (scaler.scale(loss) if one is run else loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        expected.optimizer.step()
        assert_same(run.parameters(), expected.parameters(), f"step {step}")


@pytest.mark.parametrize("wire", ["int8", "sparse"])
def test_loss_scaling_and_a_rank_without_data(on_ranks: OnRanks, wire: str) -> None:
    on_ranks(_scaled_without_data, 2, WIRES[wire])


def _one_scaler_for_two_models() -> None:
    rank = dist.get_rank()
    runs = [Training(Coded(INT8)), Training(Coded(SPARSE_INT8, ADAM))]
    alone = [Training(Coded(INT8)), Training(Coded(SPARSE_INT8, ADAM))]
    scaler = dx.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(10):
        for run in runs:
            run.optimizer.zero_grad()
        losses = [loss_of(step, rank, run.model) for run in runs]
        if step % 2:
            scaler.scale(losses[0] + losses[1]).backward()
        else:
            for loss in scaler.scale(losses):
                loss.backward()
        for run, one in zip(runs, alone, strict=True):
            scaler.step(run.optimizer)
            one.step(step)
            assert_same(run.parameters(), one.parameters(), f"step {step}")
        scaler.update()


def test_two_models_with_one_loss_scaler(on_ranks: OnRanks) -> None:
    on_ranks(_one_scaler_for_two_models, 2)
