"""`python -m ddp_crossover doctor`: what it measures, and what it makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts_of_users import TRAIN, python, torchrun, write_script

import ddp_crossover as dx
from ddp_crossover.addons.launch.diagnosis import (
    StepTime,
    about_connections,
    about_int8,
    about_numba,
    about_plain_overlap,
    about_slow_ranks,
    costs,
    duration,
    predict,
    verdict,
)
from ddp_crossover.fusion import GradientSpec
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel
from ddp_crossover.plan.ddp_buckets import DEFAULT_BUCKET_MB
from ddp_crossover.plan.model_profile import ModelProfile

DOCTOR = ("-m", "ddp_crossover", "doctor")
LAYERS = 10


def _profile(s_per_byte: float) -> ModelProfile:
    """Ten layers of 1 MB each, with 0.1 s of forward and 0.2 s of backward."""
    compute = ComputeProfile(
        use_s=tuple(0.01 * layer for layer in range(LAYERS)),
        arrival_s=tuple(0.02 * (LAYERS - layer) for layer in range(LAYERS)),
        forward_s=0.1,
        backward_s=0.2,
    )
    specs = tuple(GradientSpec(f"{layer}.weight", 250_000, 4, "float32") for layer in range(LAYERS))
    return ModelProfile(specs, compute, LinkModel(1e-4, 1e-5, s_per_byte), 2)


@pytest.mark.quick
def test_as_much_communication_as_compute_is_worth_it() -> None:
    prediction = predict(_profile(3e-8), DEFAULT_BUCKET_MB)
    assert prediction.communication_s == pytest.approx(0.3, rel=0.01)
    # Plain DDP has two buckets here, a small one that is sent in backward, and one with nearly everything.
    assert prediction.plain_s == pytest.approx(0.54, rel=0.01) and prediction.ours_s == pytest.approx(0.33, rel=0.1)
    text = verdict(prediction, {"train.py:3 reads parameters": 2}, 20, "Use: run it")
    assert text.startswith("Worth it: ") and text.endswith("Use: run it") and "train.py:3" not in text


def test_a_line_that_needs_all_updates_in_every_step_is_the_verdict() -> None:
    text = verdict(predict(_profile(3e-8), DEFAULT_BUCKET_MB), {"train.py:3 reads parameters": 19}, 20, "run it")
    assert text.startswith("Not as the script is: most steps wait") and "If they did not: 1.6" in text


@pytest.mark.parametrize(
    ("several_s_per_byte", "is_said"), [(4e-9, True), (14e-9, False), (17e-9, False), (0.0, False)]
)
def test_several_connections_are_named_where_one_is_the_limit(several_s_per_byte: float, is_said: bool) -> None:
    text = about_connections(LinkModel(1e-4, 1e-5, 16e-9), LinkModel(1e-4, 1e-5, several_s_per_byte), 4)
    said = "A connection reaches 0.5 Gb/s here, and 4 reach 2: attach with connections=4"
    assert (text or "").startswith(said) is is_said


@pytest.mark.parametrize(("of_script_s_per_byte", "is_said"), [(16e-9, True), (4.4e-9, False)])
def test_connections_are_not_named_to_a_script_that_has_them(of_script_s_per_byte: float, is_said: bool) -> None:
    one, several, of_script = (LinkModel(1e-4, 1e-5, s_per_byte) for s_per_byte in (16e-9, 4e-9, of_script_s_per_byte))
    assert (about_connections(one, several, 4, of_script) is not None) is is_said


def test_numba_is_named_where_codes_would_pay_and_it_is_not_there() -> None:
    profile = _profile(3e-7)
    pays, does_not = (about_int8(predict(profile, DEFAULT_BUCKET_MB, int8_s_per_element=s)) for s in (1e-9, 1e-5))
    assert pays is not None and does_not is None
    assert (about_numba(pays, is_there=False) or "").startswith("Install numba (pip install numba)")
    assert about_numba(pays, is_there=True) is None and about_numba(does_not, is_there=False) is None


def test_each_cost_and_each_way_out_is_said_once_and_no_count_exceeds_the_steps() -> None:
    obstacles = {"train.py:9 reads": 2, "train.py:3 clips": 54, "train.py:4 clips": 30}
    advice = {what: "Attach with norms='sharded'." for what in obstacles if "clips" in what}
    said = costs(obstacles, advice, 30, None)
    assert said == [
        "Costs overlap in 30 of 30 steps: train.py:3 clips.",
        "  Attach with norms='sharded'.",
        "Costs overlap in 30 of 30 steps: train.py:4 clips.",
        "Costs overlap in 2 of 30 steps: train.py:9 reads.",
        "  What stands behind that, the doctor says with --norms sharded.",
    ]
    assert costs(obstacles, advice, 30, "sharded") == said[:-1]


def test_a_fast_link_is_not_worth_it() -> None:
    text = verdict(predict(_profile(1e-11), DEFAULT_BUCKET_MB), {}, 20, "run it")
    assert text.startswith("Not worth it here: no gain (300 ms a step instead of 300 ms;")


def test_it_never_predicts_a_loss_because_the_tuner_would_keep_plain_all_reduces() -> None:
    assert predict(_profile(1e-8), DEFAULT_BUCKET_MB, StepTime(0.1, 0.1, 0.1)).gain == 0.0


def test_compute_that_was_measured_on_a_busier_machine_fits_into_a_step_of_plain_ddp() -> None:
    prediction = predict(_profile(1e-10), DEFAULT_BUCKET_MB, StepTime(0.1, 0.1, 0.1))
    assert prediction.compute_s == pytest.approx(0.1) and prediction.ours_s < 0.102
    assert prediction.gain_high <= prediction.communication_s / 0.1


@pytest.mark.parametrize(
    ("plain_s", "ours_s", "said"),
    [
        ((0.5, 0.52), (0.40, 0.42), "Worth it: 1.19 to 1.30 times as fast"),
        ((0.5, 0.52), (0.45, 0.53), "Cannot tell: 0.94 to 1.16 times as fast"),
        ((0.5, 0.52), (0.53, 0.56), "Not worth it here: no gain (545 ms a step instead of 510 ms;"),
        ((0.5, 0.52), (0.51, 0.52), "Not worth it here: a gain of at most 2.0%"),
    ],
)
def test_a_verdict_is_what_the_whole_interval_says(plain_s, ours_s, said) -> None:
    times = (StepTime(sum(ends_s) / 2, *ends_s) for ends_s in (plain_s, ours_s))
    assert verdict(predict(_profile(3e-8), DEFAULT_BUCKET_MB, *times), {}, 20, "").startswith(said)


def test_no_gain_exceeds_what_communication_takes() -> None:
    prediction = predict(_profile(1e-10), DEFAULT_BUCKET_MB, StepTime(0.5, 0.4, 0.6), StepTime(0.3, 0.2, 0.4))
    assert prediction.gain_high == pytest.approx(prediction.communication_s / 0.3) and prediction.gain_high < 0.01
    said = "(300 ms a step instead of 500 ms, more than communication explains; compute takes 300 ms a step"
    assert said in verdict(prediction, {}, 20, "")


@pytest.mark.parametrize(
    ("s_per_byte", "plain_s", "is_said"),
    [
        (3e-8, 0.6, True),  # 0.3 s of compute and 0.3 s of all-reduces, one after the other
        (3e-8, 0.54, False),  # as predicted
        (3e-8, 0.5, False),
        (1e-10, 0.301, False),  # there is nothing to hide
    ],
)
def test_all_reduces_that_backward_does_not_hide_are_named(s_per_byte, plain_s, is_said) -> None:
    plain = StepTime(plain_s, plain_s * 0.99, plain_s * 1.01)
    said = about_plain_overlap(predict(_profile(s_per_byte), DEFAULT_BUCKET_MB, plain), plain)
    assert bool(said) == is_said
    assert not said or ("where 59.8 ms was predicted" in said and "TORCH_DIST_USE_NCCL2=0" in said)


def test_the_interval_of_a_step_time_reaches_over_runs_and_drift() -> None:
    steady, noisy = [0.1] * 16, [0.1, 0.3] * 8
    assert StepTime.of(steady) == StepTime(0.1, 0.1, 0.1)
    assert StepTime.of(steady, [0.12] * 16) == StepTime(pytest.approx(0.11), 0.1, 0.12)
    assert StepTime.of(noisy).low_s == 0.1 and StepTime.of(noisy).high_s == 0.3
    assert StepTime.of(steady, drift=1.5) == StepTime(0.1, pytest.approx(0.1 / 1.5), pytest.approx(0.15))


def test_durations_are_in_units_that_are_read_at_once() -> None:
    assert [duration(s) for s in (1.98e-3, 45e-6, 0.3, 12.34)] == ["1.98 ms", "45 us", "300 ms", "12.3 s"]
    assert duration(0) == duration(7e-18) == "0 ms"


def test_a_slow_rank_is_named_with_what_balance_would_gain() -> None:
    steady = StepTime(0.4, 0.39, 0.41)
    said = about_slow_ranks([0.2, 0.4, 0.2], steady)
    assert said is not None
    assert said.startswith(
        "Rank 1 is the slowest: it computes for 400 ms a step, the fastest for 200 ms. With batches by"
    )
    assert said.endswith("compute for about 240 ms, so a step would take up to 160 ms less.")
    assert about_slow_ranks([0.2, 0.21], steady) is None
    assert about_slow_ranks([0.2], steady) is None
    assert about_slow_ranks([0.0, 0.2], steady) is None
    noisy = StepTime(0.4, 0.3, 0.6)
    assert about_slow_ranks([0.2, 0.4, 0.2], noisy) is None, "steps differ by more than these ranks"


def _report(*arguments: str) -> dict[str, Any]:
    done = torchrun(*DOCTOR, "--json", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    [pair] = report["pairs"]
    assert pair["ranks"] == [0, 1] and pair["bytes_per_s"] > 1e6 and 0 < pair["latency_s"] < 1
    assert report["versions"]["ddp_crossover"] == dx.__version__ and report["versions"]["torch"]
    return report


def test_a_script_is_measured_and_the_line_that_costs_overlap_is_named(tmp_path: Path) -> None:
    clips = "torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)"
    script = write_script(tmp_path, before_step=clips)
    report = _report(str(script))
    assert report["prediction"]["compute_s"] > 0 and report["prediction"]["plain_s"] > 0
    line = 1 + script.read_text().splitlines().index(" " * 12 + clips)
    assert any(f"train_it.py:{line}" in what for what in report["obstacles"]), report["obstacles"]


@pytest.mark.nightly
def test_a_rank_that_computes_slowly_is_named(tmp_path: Path) -> None:
    hook = "net.register_forward_pre_hook(lambda *_: __import__('time').sleep(0.05))"
    slow = f"    if dist.get_rank() == 1:\n        {hook}\n"
    text = TRAIN.replace("    optimizer = torch.optim", slow + "    optimizer = torch.optim")
    report = _report(str(write_script(tmp_path, text)))
    assert report["slow_ranks"].startswith("Rank 1 is the slowest"), report
    fast_s, slow_s = report["rank_compute_s"]
    assert slow_s > 0.05 > fast_s


@pytest.mark.nightly
def test_without_a_script_known_models_are_predicted() -> None:
    report = _report()
    assert len(report["known_models"]) == 9
    assert all(row["ours_s"] >= row["compute_s"] for row in report["known_models"])


def test_alone_it_says_how_to_start_it() -> None:
    done = python(*DOCTOR, RANK="")
    assert done.returncode == 2 and "start it as you start that" in done.stderr


@pytest.mark.nightly
def test_a_script_that_fails_is_shown(tmp_path: Path) -> None:
    done = torchrun(*DOCTOR, str(write_script(tmp_path, "raise RuntimeError('broken script')")))
    assert done.returncode != 0
    assert "the script ended with exit status 1" in done.stderr and "broken script" in done.stderr
