"""`scripts/gpu_bench.py`: a whole rehearsal on a CPU, and the emulated wire, of which training must not notice a thing
but the time.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
import gpu_bench
import launched
from fake_streams import fake_gpu
from gpu_bench_parts.emulation import emulated_wire, make_gpu_wire, plugged_in
from gpu_bench_parts.options import make_cases, parse_args
from gpu_bench_parts.settings import CaseSettings
from gpu_bench_parts.summary import headline, summarize
from gpu_bench_parts.wire import GBIT, Wire
from gpu_check_parts.training import Job, Recipe, difference

RUN_TIMEOUT_S = 300
ARMS = ["noop", "ddp@25", "ddp@0.5", "auto", "ddp, no wire", "dear, no wire"]
CPU = torch.device("cpu")


@pytest.mark.nightly
@pytest.mark.xdist_group("gpu_bench")
def test_a_rehearsal(tmp_path: Path) -> None:
    file = tmp_path / "new" / "bench.json"
    small = "--device cpu --rounds 2 --steps-per-round 2 --buckets 25,0.5 --precision fp32 --batch 2"
    arguments = [*small.split(), "--json", file]
    printed = launched.run(launched.SCRIPTS / "gpu_bench.py", *arguments, timeout_s=RUN_TIMEOUT_S)
    record = json.loads(file.read_text())
    (case,) = record["cases"]
    assert case["state"] == "ok" and case["rounds"] == 2 and [arm["arm"] for arm in case["arms"]] == ARMS
    for arm in case["arms"]:
        assert f"  {arm['arm']} " in printed and f"{arm['over_bound']['median']:.3f}" in printed
    assert case["bound_s"] == max(case["compute_s"], case["wire_s"]) and case["best_ddp"] in ARMS
    # It is never taken for a measurement.
    assert record["configuration"]["is_gpu_measurement"] is False
    heading = next(line for line in printed.splitlines() if line.startswith("small, 2 Gb/s"))
    assert "REHEARSAL" in heading and "says nothing about a GPU" in heading
    # The wire takes the time of a ring, and nobody can be done before it is.
    wire = Wire(4)
    wire.bytes_per_s, wire.latency_s = 2 * GBIT, 20e-6
    asked_s = wire.all_reduce_s(case["measured"]["gradient_bytes"])
    assert all(flat_s >= asked_s for flat_s in case["measured"]["flat_s"])
    arms = {arm["arm"]: arm for arm in case["arms"]}
    assert all(arms[name]["step_s"]["low"] > 0.9 * asked_s for name in ("ddp@25", "auto"))


def test_the_wire_takes_the_time_of_a_ring() -> None:
    wire = Wire(4)
    wire.bytes_per_s, wire.latency_s = 2 * GBIT, 20e-6
    assert wire.all_reduce_s(1e6) == pytest.approx(2 * (20e-6 + 0.75e6 / 0.25e9))


def trained(wired: bool, on_gpu: bool) -> dict[str, Any]:
    """What a job ends with on one rank: over a wire with three twins, or with plain DDP."""
    recipe = Recipe("AdamW", {"lr": 0.01})
    if not wired:
        return Job(recipe, CPU, 0, with_dear=False).train()
    if not on_gpu:
        with emulated_wire(4, CPU) as wire:
            wire.latency_s = 1e-4
            return _train(recipe)
    with fake_gpu(), plugged_in(make_gpu_wire(4, CPU)):
        return _train(recipe)


def _train(recipe: Recipe) -> dict[str, Any]:
    job = Job(recipe, CPU, 0, with_dear=True)
    seen = job.train()
    stats = job.state.stats()
    assert job.state._link.world_size == 4 and job.state.plan.world_size == 4
    # Not that nothing fell back: on the CPU a thread of the wire may still hold a bucket when backward ends.
    assert stats.pipelined_iterations > stats.iterations // 2
    job.close()
    return seen


@pytest.mark.parametrize("on_gpu", [False, True], ids=["rehearsal", "on_fake_streams"])
def test_with_twins_training_has_the_bits_of_plain_ddp(on_ranks, on_gpu: bool) -> None:
    (expected,), (seen,) = on_ranks(trained, 1, False, on_gpu), on_ranks(trained, 1, True, on_gpu)
    assert difference(seen, expected) == (0.0, [])


def norms_of_twins() -> float:
    with fake_gpu(), plugged_in(make_gpu_wire(4, CPU)):
        ddp = DistributedDataParallel(nn.Linear(4, 3))
        state = dx.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.0), fusion_mb=1.0)
        rows = state._link.all_gather_small(torch.tensor([3.0, 4.0]))
        state.detach()
    return rows.tolist()


def test_norms_of_twins_are_ones_own(on_ranks) -> None:
    assert on_ranks(norms_of_twins, 1) == [[[3.0, 4.0]] * 4]


MEASURED: dict[str, Any] = {
    "flat_s": [0.9, 1.0, 1.1],
    "rounds_s": {"noop": [0.8, 0.8, 0.8], "ddp@25": [2.0, 2.0, 2.0], "ddp@8": [1.5, 1.5, 1.5], "auto": [1.0, 1.2, 4.0]},
    "host_s": {name: [0.1] * 3 for name in ("noop", "ddp@25", "ddp@8", "auto")},
    "memory_bytes": {"ddp@25": 100, "auto": 150},
    "traced_exposed_s": {},
    "warm_up_steps": dict.fromkeys(("noop", "ddp@25", "ddp@8", "auto"), 6),
    "facts": {name: {"left_alone": False} for name in ("noop", "ddp@25", "ddp@8", "auto")},
}


def test_figures_are_taken_within_rounds_and_against_the_best_ddp() -> None:
    case = summarize(CaseSettings("small", 1.0, buckets_mb=(25.0, 8.0)), MEASURED)
    assert case["bound_s"] == 1.0 and case["best_ddp"] == "ddp@8"
    auto = case["arms"][-1]
    assert auto["over_bound"]["median"] == pytest.approx(1.2) and auto["memory_over_default_ddp"] == 1.5
    assert auto["over_compute_s"]["median"] == pytest.approx(0.4)
    assert auto["speedup_over_best_ddp"]["median"] == pytest.approx(1.25)
    assert headline(case).startswith("1.25 times as fast as ddp@8; T/T* 1.20, 400.0 ms over compute")


def test_a_case_that_was_cut_short_is_summed_up_as_far_as_it_came() -> None:
    settings = CaseSettings("small", 1.0, buckets_mb=(25.0, 8.0))
    no_round = MEASURED | {"flat_s": [], "rounds_s": {"noop": [], "auto": []}}
    assert summarize(settings, no_round)["arms"] == [] and headline(summarize(settings, no_round)) == "no round is over"
    second = MEASURED["rounds_s"] | {"auto": [1.0]}
    (auto,) = [arm for arm in summarize(settings, MEASURED | {"rounds_s": second})["arms"] if arm["arm"] == "auto"]
    assert auto["speedup_over_best_ddp"]["median"] == 1.5


def test_one_case_for_each_model_and_speed() -> None:
    cases = make_cases(parse_args("", ["--models", "resnet50,bert_base", "--gbit", "25,10", "--timeline", "new/t.png"]))
    assert [case.name for case in cases] == [
        "resnet50, 25 Gb/s", "bert_base, 25 Gb/s", "resnet50, 10 Gb/s", "bert_base, 10 Gb/s",
    ]  # fmt: skip
    assert cases[-1].timeline.endswith("/new/t-bert_base-10g.png")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_bench.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err
