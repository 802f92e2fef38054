"""The simulated GPU of `scripts/sim_lease.py`: who has it and for how long, and that it is like the one measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sim_lease
from sim_lease_parts.gpu import Gpu, Process, Sharing
from sim_lease_parts.measure import ARMS, Case, measure
from sim_lease_parts.models import MEASURED_MS, MODELS, RATIO_MODEL, groups_of, layers_of

FREE = Sharing(switch_s=0.0)
MPS = Sharing(mps=True)


def ends(gpu: Gpu, *kernels: tuple[Process, float]) -> list[float]:
    """When kernels end that are queued at once, each on a stream of its own."""
    events = []
    for process, seconds in kernels:
        stream = process.stream()
        stream.compute(seconds)
        events.append(stream.record())
    gpu.advance(1e3, ())
    return [event.at_s for event in events if event.at_s is not None]


def test_a_kernel_alone_takes_its_own_time() -> None:
    gpu = Gpu(FREE)
    assert ends(gpu, (gpu.process(), 10.5e-3)) == [pytest.approx(10.5e-3)]


def test_processes_get_slices_in_turn() -> None:
    gpu = Gpu(FREE)
    assert ends(gpu, (gpu.process(), 10e-3), (gpu.process(), 10e-3)) == [pytest.approx(18e-3), pytest.approx(20e-3)]


def test_a_change_of_process_takes_time() -> None:
    gpu = Gpu(Sharing(switch_s=1e-3))
    # Five slices and four changes before the end of the first one, one more for the other.
    assert ends(gpu, (gpu.process(), 6e-3), (gpu.process(), 6e-3)) == [pytest.approx(14e-3), pytest.approx(17e-3)]


def test_kernels_wait_for_events_and_the_host_for_nothing() -> None:
    gpu = Gpu(FREE)
    process = gpu.process()
    compute, wire = process.stream(), process.stream()
    wire.spin(5e-3)
    compute.compute(1e-3)
    compute.wait(wire.record())
    compute.compute(1e-3)
    end = compute.record()
    gpu.advance(1.0)
    assert end.at_s == pytest.approx(6e-3)
    assert process.computed_s == pytest.approx(2e-3)


def test_a_kernel_that_only_waits_slows_another_process_down_as_measured() -> None:
    for sharing, slower in ((Sharing(), 1.89), (MPS, 1.14)):
        gpu = Gpu(sharing)
        waiting, computing = gpu.process(), gpu.process()
        waiting.stream().spin(1.0)
        assert ends(gpu, (computing, 0.2)) == [pytest.approx(0.2 * slower, rel=0.05)]


def test_legs_of_gloo_occupy_no_gpu() -> None:
    gpu = Gpu(Sharing(legs_on_host=True))
    waiting, computing = gpu.process(), gpu.process()
    leg = gpu.wire(waiting)
    leg.spin(1.0)
    done = leg.record()
    assert ends(gpu, (computing, 0.2)) == [pytest.approx(0.2)]
    assert done.at_s == pytest.approx(1.0)


def test_what_ends_in_a_slice_of_another_process_is_seen_in_the_next_own_one() -> None:
    gpu = Gpu(FREE)
    waiting, computing = gpu.process(), gpu.process()
    stream = waiting.stream()
    stream.spin(2e-3)
    done = stream.record()
    computing.stream().compute(20e-3)
    gpu.advance(1.0)
    assert done.at_s == pytest.approx(Sharing().spin_slice_s + Sharing().slice_s)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(1e-4, 5e-2)), min_size=1, max_size=10))
def test_the_gpu_is_never_idle_while_there_is_work(kernels: list[tuple[int, float]]) -> None:
    gpu = Gpu(FREE)
    streams = [gpu.process().stream() for _ in range(3)]
    for place, seconds in kernels:
        streams[place].compute(seconds)
    last = [stream.record() for stream in streams]
    gpu.advance(1e3)
    assert max(event.at_s or 0.0 for event in last) == pytest.approx(sum(seconds for _, seconds in kernels))


@pytest.mark.parametrize("name", MODELS)
def test_groups_have_all_layers_and_take_all_of_the_wire(name: str) -> None:
    layers, groups = layers_of(MODELS[name]), groups_of(MODELS[name], 0.1, 8.0)
    assert sorted(index for group in groups for index in range(group.first, group.last + 1)) == list(range(len(layers)))
    assert sum(group.leg_s for group in groups) == pytest.approx(0.05, abs=len(groups) * 21e-6)


# Speeds of an H200 over those alone (docs/gpu.md): main job and filler, and two training jobs.
MEASURED = {
    (1, "NCCL"): [0.61, 0.53],
    (1, "NCCL, MPS"): [0.60, 0.79],
    (2, "NCCL, MPS"): [0.97, 0.97],
}


def arms_of(trainings: int, *names: str) -> dict[str, Any]:
    """ResNet-50 at 25 Gb/s, one job beside a filler or two jobs."""
    case = Case(MODELS["resnet50"], MEASURED_MS["resnet50"] * 1e-3, trainings, has_filler=trainings == 1)
    arms: dict[str, Any] = measure(case, 1, 20, 10, {name: ARMS[name] for name in names})["arms"]
    return arms


@pytest.mark.parametrize(("trainings", "arm"), MEASURED)
def test_jobs_share_it_as_they_shared_an_h200(trainings: int, arm: str) -> None:
    figures = arms_of(trainings, arm)[arm]
    first, second = MEASURED[trainings, arm]
    assert figures["main"]["median"] == pytest.approx(first, rel=0.1)
    if trainings == 1:
        assert figures["filler"]["median"] == pytest.approx(second, rel=0.1)
    else:
        assert figures["together"]["median"] == pytest.approx(first + second, rel=0.1)


def test_beside_a_filler_a_held_forward_keeps_the_main_job_fast_and_fills_what_it_leaves_idle() -> None:
    case = Case(RATIO_MODEL, 1.7 * RATIO_MODEL.compute_s, 1, has_filler=True)
    # Longer than it takes to compare steps with the lease and without it.
    figures = measure(case, 1, 20, 60, {"gloo, lease": ARMS["gloo, lease"]})["arms"]["gloo, lease"]
    assert figures["main"]["median"] > 0.97
    assert figures["idle_filled"]["median"] > 0.85


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--models", "resnet50", "--gbit", "25", "--ratios", "0", "--jobs", "filler"]
    assert (
        sim_lease.main([*arguments, "--quick", "--window", "6", "--settle", "4", "--json", str(tmp_path / "sim.json")])
        == 0
    )
    [case] = json.loads((tmp_path / "sim.json").read_text())["cases"]
    assert set(case["arms"]) == set(ARMS)
    assert "resnet50" in capsys.readouterr().out
