"""The tuner uses codes where they are clearly faster, declines them elsewhere, and says so."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.codecs.wire import Wire
from ddp_crossover.fusion import MB, Schedule
from ddp_crossover.planning.gradient_specs import gradient_specs
from ddp_crossover.planning.link_probe import probe_codecs
from ddp_crossover.planning.trials import Candidate
from ddp_crossover.planning.tuner import Tuner, TuningResult
from models import DeepNet

MOST_STEPS = 150


def tuned(coded_s: float, as_they_are_s: float, plain_s: float) -> TuningResult:
    """The end of a search on a machine where only the kind of candidate counts."""
    tuner = Tuner(Candidate(1.0, is_coded=True), model_bytes=100 * MB, as_they_are=Candidate(4.0))
    while tuner.result is None:
        candidate = tuner.candidate
        is_plain = candidate.schedule is Schedule.ALLREDUCE
        tuner.observe(plain_s if is_plain else coded_s if candidate.is_coded else as_they_are_s)
    return tuner.result


@pytest.mark.quick
def test_codes_are_used_where_they_are_clearly_faster() -> None:
    result = tuned(coded_s=0.10, as_they_are_s=0.12, plain_s=0.15)
    assert result.best.is_coded and result.declined is None
    assert "of codes" in result.describe()


@pytest.mark.quick
@pytest.mark.parametrize("coded_s", [0.0995, 0.1, 0.2], ids=["hardly faster", "as fast", "slower"])
def test_codes_that_do_not_pay_are_declined(coded_s) -> None:
    result = tuned(coded_s=coded_s, as_they_are_s=0.1, plain_s=0.15)
    assert result.best == result.fastest and not result.best.is_coded
    assert result.declined is not None and result.declined.is_coded
    assert result.declined_s == pytest.approx(coded_s, rel=0.01)
    assert "gradients travel as they are" in result.describe() and "set fusion_mb" in result.describe()


@pytest.mark.quick
def test_plain_all_reduces_win_over_both_where_they_are_as_fast() -> None:
    result = tuned(coded_s=0.1, as_they_are_s=0.1, plain_s=0.1)
    assert result.best.schedule is Schedule.ALLREDUCE and result.declined is not None


@pytest.mark.quick
def test_the_size_is_searched_among_the_faster_kind() -> None:
    result = tuned(coded_s=0.10, as_they_are_s=0.12, plain_s=0.15)
    sizes = {trial.candidate.fusion_mb for trial in result.trials if trial.candidate.is_coded}
    assert len(sizes) > 2
    assert {t.candidate for t in result.trials if not t.candidate.is_coded} == {
        Candidate(4.0),
        Candidate(1.0, Schedule.ALLREDUCE),
    }


@pytest.mark.quick
def test_the_planner_knows_the_bytes_of_each_leg() -> None:
    named = list(DeepNet().named_parameters())
    specs = gradient_specs(named, Wire.of(torch.int8, dx.TopK(0.01)))
    for spec, (name, parameter) in zip(specs, named, strict=True):
        assert spec.is_coded == (parameter.dim() > 1), name
        scatter_bytes, gather_bytes = spec.itemsize_bytes * spec.scatter_part, spec.itemsize_bytes * spec.gather_part
        expected = (0.06, 1 + 2 / 64) if spec.is_coded else (4.0, 4.0)
        assert (scatter_bytes, gather_bytes) == pytest.approx(expected, rel=0.01), name
    assert 0 < probe_codecs(Wire.of(torch.int8)) < 1e-6


class Tuned(NamedTuple):
    """What became of codes in a training run with the tuner."""

    progress: str
    is_coded: bool
    keeps_what_is_left_out: bool


def _train_until_settled() -> Tuned:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(DeepNet(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    state = dx.attach(ddp, optimizer, wire_dtype=torch.int8)
    for _ in range(MOST_STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        if not state.tuning:
            break
    ddp(torch.randn(4, 7)).square().mean().backward()
    plan = state.plan
    found = Tuned(state.tuning_progress(), plan is not None and plan.is_coded, "residual" in state.state_dict())
    state.detach()
    return found


def test_on_a_link_without_a_wait_codes_are_declined_and_their_memory_is_freed(on_ranks) -> None:
    """Gradients of some KiB over loopback: encoding them takes longer than sending them."""
    for found in on_ranks(_train_until_settled, 2):
        assert found.progress.startswith("tuned: ")
        assert found.keeps_what_is_left_out == found.is_coded
        assert found.is_coded != ("gradients travel as they are" in found.progress)
