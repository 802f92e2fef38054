"""`scripts/bench.py`: a whole run, as small as can be, over loopback; what it makes of its figures; paced layers."""

import io
import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import lab
import launched
from bench_kit import launch, paced, thread_times
from bench_parts import options, report
from bench_parts.cases import CaseSettings
from bench_parts.summary import summarize
from ddp_crossover.fusion import GradientSpec
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel
from ddp_crossover.plan.model_profile import ModelProfile
from equivalence import Case, Run, plain_loop

RUN_TIMEOUT_S = 450
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(given: str, directory: Path) -> tuple[dict[str, Any], str, bytes]:
    """The record, what was printed and the chart of a run with four small layers, started in a directory."""
    json_file, plot_file = directory / "new" / "bench.json", directory / "new" / "bench.png"
    small = "--parameters 400000 --blocks 2 --weights-per-block 2 --rounds 2 --steps-per-round 1"
    arguments = [*small.split(), *given.split(), "--json", json_file, "--plot", plot_file]
    output = launched.run(launched.SCRIPTS / "bench.py", *arguments, timeout_s=RUN_TIMEOUT_S, cwd=directory)
    return json.loads(json_file.read_text()), output, plot_file.read_bytes()


@pytest.mark.xdist_group("bench")
def test_a_whole_run_over_loopback(tmp_path: Path) -> None:
    chosen = "noop,ddp,dear,allreduce,fsdp2,local-1,post-local-1"
    record, output, chart = run(f"--no-lab --ratios 0.05 --arms {chosen} --buckets 25,1", tmp_path)
    (case,) = record["cases"]
    arms = {arm["arm"]: arm for arm in case["arms"]}
    assert list(arms) == ["noop", "ddp@25", "ddp@1", "dear", "allreduce", "fsdp2", "local-1", "post-local-1"]
    for name, arm in arms.items():
        assert arm["refused"] is None
        assert len(arm["rounds_s"]) == 2 and all(seconds > 0 for seconds in arm["rounds_s"])
        assert arm["step_s"].keys() == arm["over_bound"].keys() == {"low", "median", "high"}
        row = next(line.split() for line in output.splitlines() if line.split()[:1] == [name])
        assert row[1] == f"{1e3 * arm['step_s']['median']:.1f}" and row[3] == f"{arm['over_bound']['median']:.3f}"
    assert case["bound_s"] == max(case["compute_s"], case["all_reduce_best_s"])
    assert case["gradient_bytes"] == 4 * 400000 and case["tensors"] == 4
    assert case["best_ddp"] in ("ddp@25", "ddp@1")
    # Ours is measured as a pipeline.
    assert arms["dear"]["plan"].startswith("FusionPlan") and not arms["dear"]["fallbacks"]
    assert arms["allreduce"]["plan"] is None
    # The pace makes up for what is not sleep; a backward sleeps twice as long as a forward.
    sleeps_s = case["tensors"] * 3 * case["paced_forward_s_per_layer"]
    assert 0 < sleeps_s < case["all_reduce_at_start_s"] / case["settings"]["ratio"]
    assert sleeps_s <= case["compute_s"]
    # Loopback is never taken for a network.
    assert record["configuration"]["is_network_measurement"] is False
    assert "NOT a measurement" in record["configuration"]["network"]
    heading = next(line for line in output.splitlines() if line.startswith("paced, uniform, A/C 0.05"))
    assert "NOT a measurement of a network" in heading
    assert chart.startswith(PNG_SIGNATURE)


def test_ranks_run_over_loopback_meet_and_end_together() -> None:
    lines: list[str] = []
    meet = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); print(dist.get_rank())"
    with launch.over_loopback(2) as run_ranks:
        run_ranks(["-c", meet], {}, lines.append)
        assert sorted(lines) == ["0", "1"]
        fail = f"import time; {meet}; dist.get_rank() == 0 or exit('out of paper'); time.sleep(60)"
        began_s = time.monotonic()
        with pytest.raises(launch.CaseFailed, match=r"rank 1 ended with exit code 1(.|\n)*out of paper"):
            run_ranks(["-c", fail], {}, lines.append)
        assert time.monotonic() - began_s < 50, "rank 0 sleeps for 60 s and must not be waited for"


def test_ranks_over_loopback_that_take_too_long_are_ended_and_say_where_they_are(tmp_path: Path) -> None:
    hang = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(60)"
    with (
        launch.over_loopback(2, timeout_s=2.0) as run_ranks,
        pytest.raises(launch.CaseFailed, match=r"not ended after 2 s(.|\n)*rank 1 ended(.|\n)*in <module>"),
    ):
        run_ranks(["-c", hang, str(tmp_path)], {}, print)
    pids = [file.name for file in tmp_path.iterdir()]
    assert len(pids) == 2 and not any(Path("/proc", pid).exists() for pid in pids)


@pytest.mark.nightly
@pytest.mark.skipif(lab.why_no_lab() is not None, reason="needs the rights to build a lab")
def test_ranks_run_on_the_hosts_of_a_lab() -> None:
    lines: list[str] = []
    say_rank = ["-c", "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['SAY'])"]
    with launch.on_lab(2, "none") as run_ranks:
        run_ranks(say_rank, {"SAY": "so"}, lines.append)
        assert sorted(line.strip() for line in lines) == ["0 2 so", "1 2 so"]
        with pytest.raises(launch.CaseFailed, match="out of paper"):
            run_ranks(["-c", "raise SystemExit('out of paper')"], {}, lines.append)


@pytest.mark.nightly
@pytest.mark.skipif(lab.why_no_lab() is not None, reason="needs the rights to build a lab")
def test_hosts_of_a_lab_count_what_they_send(tmp_path: Path) -> None:
    # A directory with another package of that name must not take the place of the one that is measured.
    (tmp_path / "ddp_crossover.py").write_text("raise ImportError('not this one')")
    record, _, _ = run("--ratios 1 --optimizer adamw --arms auto,zero@1", tmp_path)
    (case,) = record["cases"]
    assert record["configuration"]["is_network_measurement"] and case["settings"]["optimizer"] == "adamw"
    assert [arm["arm"] for arm in case["arms"]] == ["noop", "auto", "zero@1"]
    noop, *others = (arm["sent_bytes"]["median"] for arm in case["arms"])
    assert all(noop < 0.1 * case["gradient_bytes"] < sent for sent in others)


def _by_role(**rounds_s: list[float]) -> dict[str, list[float]]:
    return {role: rounds_s.get(role, [0.0] * 3) for role in thread_times.COLUMNS}


MEASURED: dict[str, Any] = {
    "case": {"parameters": 10, "tensors": 2, "all_reduces_s": [1.2, 1.0, 1.1]},
    "rounds_s": {
        "noop": [0.8, 0.8, 0.9], "ddp@25": [2.0, 2.0, 8.0], "ddp@1": [1.5, 1.5, 6.0], "auto": [1.0, 1.2, 4.0],
    },
    "processor_s": {
        "noop": _by_role(training=[0.1] * 3), "ddp@25": _by_role(training=[0.2] * 3),
        "ddp@1": _by_role(training=[0.2] * 3), "auto": _by_role(training=[0.2, 0.05, 0.1], posting=[0.1, 0.05, 0.1]),
    },
    "sent_bytes": {"noop": [0.0] * 3, "ddp@25": [50.0] * 3, "ddp@1": [60.0] * 3, "auto": [40.0] * 3},
    "refused": {"ddp-bf16": "refused"},
    "warm_up_steps": {"noop": 6, "ddp@25": 6, "ddp@1": 6, "auto": 8},
    "make_s": dict.fromkeys(("noop", "ddp@25", "ddp@1", "auto"), 0.5),
    "warm_up_s": dict.fromkeys(("noop", "ddp@25", "ddp@1", "auto"), 2.0),
    "facts": {"noop": {}, "ddp@25": {}, "ddp@1": {}, "auto": {}},
    "profile": None,
}  # fmt: skip


def test_ratios_are_taken_within_a_round() -> None:
    settings = CaseSettings("paced", ("noop", "ddp@25", "ddp@1", "ddp-bf16", "auto"), rounds=3, steps=1, ratio=1.0)
    case = summarize(settings, MEASURED)
    *_, refused, auto = case["arms"]
    assert case["best_ddp"] == "ddp@1"
    # The slow third round is slow for both. The ratio of the medians would be 1.25.
    assert auto["speedup_over_best_ddp"]["median"] == pytest.approx(1.5)
    assert auto["speedup_over_default_ddp"]["median"] == pytest.approx(2.0)
    assert auto["processor_s"]["median"] == pytest.approx(0.2)
    assert auto["processor_s_by_thread"]["training"] == auto["processor_s_by_thread"]["posting"] == 0.1
    assert refused == {"arm": "ddp-bf16", "refused": "refused"}


def test_the_bound_is_the_longer_of_compute_and_the_best_all_reduce() -> None:
    settings = CaseSettings("paced", ("noop", "auto"), rounds=3, steps=1, ratio=1.0)
    case = summarize(settings, MEASURED)
    assert case["bound_s"] == 1.0 and case["ratio_measured"] == pytest.approx(1.25)
    assert case["arms"][-1]["over_bound"]["median"] == pytest.approx(1.2)
    slow_compute = MEASURED | {"rounds_s": MEASURED["rounds_s"] | {"noop": [2.0, 2.0, 2.0]}}
    assert summarize(settings, slow_compute)["bound_s"] == 2.0


def test_the_least_step_is_that_of_the_measured_times() -> None:
    # Of 0.8 s of compute and 1 s on the wire, as the table has them; the profile has measured twice as long.
    profile = ModelProfile(
        specs=(GradientSpec("first", 5, 4, "float32"), GradientSpec("last", 5, 4, "float32")),
        compute=ComputeProfile(use_s=(0.0, 0.4), arrival_s=(0.8, 0.4), forward_s=0.8, backward_s=0.8),
        link=LinkModel(0.0, 0.0, 0.1),
    )
    settings = CaseSettings("paced", ("noop", "auto"), rounds=3, steps=1, ratio=1.0)
    case = summarize(settings, MEASURED | {"profile": profile.to_json()})
    # The link begins when the last layer's gradient arrives, after 0.2 s, and ends when that layer begins its forward.
    assert case["least_step_s"] == pytest.approx(1.0 + 0.2 + 0.2) and case["bound_s"] == 1.0
    console = Console(record=True, width=200, file=io.StringIO())
    report.print_case(console, case, "a network")
    heading, auto, _ = (line for line in console.export_text().splitlines() if line.split()[:1] in (["arm"], ["auto"]))
    assert "at best" in heading and "1.400" in auto.split()
    assert summarize(settings, MEASURED)["least_over_bound"] is None  # without the arm that measures


def test_the_price_of_tuning_is_named() -> None:
    settings = CaseSettings("paced", ("noop", "auto"), rounds=3, steps=1, ratio=1.0)
    case = summarize(settings, MEASURED | {"facts": MEASURED["facts"] | {"auto": {"tuning": "tuned"}}})
    console = Console(record=True, width=200, file=io.StringIO())
    report.print_case(console, case, "a network")
    # 2 s for 8 steps; since then one takes 1.2 s.
    assert "auto: made in 0.5 s, settled after 8 steps, which took 0.21 times as long as since" in console.export_text()


class RecordingPace(paced.Pace):
    """Tells when a layer begins to sleep."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self.factor = 1.0

    @property
    def forward_s(self) -> float:  # type: ignore[override]
        self._events.append("sleep")
        return 0.0


def test_a_gradient_comes_after_the_sleep_of_its_backward() -> None:
    events: list[str] = []
    network = paced.paced_network([1000, 1000], 1, RecordingPace(events))
    for name, parameter in network.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    network(torch.ones(1)).sum().backward()
    assert events == ["sleep", "sleep", "sleep", "0.1.weight", "sleep", "0.0.weight"]


def test_a_weight_is_read_before_the_sleep_of_its_forward() -> None:
    events: list[str] = []

    class Overwrite(RecordingPace):
        @property
        def forward_s(self) -> float:  # type: ignore[override]
            network[0][0].weight.data.fill_(7.0)
            return 0.0

    network = paced.paced_network([1000], 1, Overwrite(events))
    assert network(torch.ones(1)).item() == 1.0  # the weight was zero
    assert network(torch.ones(1)).item() == 8.0


@pytest.mark.parametrize("profile", paced.GROWTH)
@pytest.mark.parametrize(("parameters", "layers"), [(10_000_000, 32), (10_000_000, 8), (600_000, 12)])
def test_sizes_of_layers(profile: str, parameters: int, layers: int) -> None:
    sizes = paced.layer_sizes(parameters, layers, profile)
    assert len(sizes) == layers and sum(sizes) == parameters
    if profile == "uniform":
        assert max(sizes) - min(sizes) <= paced.COLUMNS
    else:
        assert all(a <= b for a, b in itertools.pairwise(sizes))
        assert sum(sizes[-layers // 4 :]) == pytest.approx(0.70 * parameters, rel=0.02)


def test_gradients_are_written_out_in_full() -> None:
    network = paced.paced_network([1000, 1500], 2, paced.Pace(0.0))
    network(torch.ones(1)).sum().backward()
    for parameter in network.parameters():
        assert parameter.dim() == 2 and parameter.grad is not None and parameter.grad.is_contiguous()
        assert parameter.grad.eq(1).all()


def test_arms_are_written_out_and_noop_always_takes_part() -> None:
    args = options.parse_args("", ["--arms", "ddp,auto@1,auto@25,dear,auto", "--buckets", "25,0.5"])
    assert args.arms == ["noop", "ddp@25", "ddp@0.5", "auto@1", "auto", "dear"]


def test_one_case_for_each_profile_and_ratio() -> None:
    given = "--workloads paced,transformer --profile uniform,heavy-end --ratios 0.5,2 --tokens 64"
    cases = options.make_cases(options.parse_args("", given.split()))
    assert [(case.profile, case.ratio) for case in cases[:-1]] == [
        ("uniform", 0.5), ("uniform", 2.0), ("heavy-end", 0.5), ("heavy-end", 2.0),
    ]  # fmt: skip
    assert cases[-1].name == "transformer, 64 tokens"


def test_processor_time_is_told_apart_by_thread() -> None:
    def spin() -> None:
        while not stop.is_set():
            pass

    stop = threading.Event()
    before_s = thread_times.processor_s()
    thread = threading.Thread(target=spin, name="ddp_crossover-post")
    thread.start()
    while thread_times.processor_s()["posting"] < before_s["posting"] + 0.05:
        time.sleep(0.01)
    after_s = thread_times.processor_s()
    stop.set()
    thread.join()
    assert after_s["reducing"] == before_s["reducing"] and after_s["training"] - before_s["training"] < 0.05
    assert sum(after_s.values()) == pytest.approx(time.process_time(), abs=0.05)


def _threads_in_training() -> set[str]:
    run = Run(Case(), with_dear=True)
    list(plain_loop(run))
    names = {thread.name for thread in threading.enumerate()}
    run.detach()
    return names


def test_threads_have_the_names_by_which_they_are_told_apart(on_ranks) -> None:
    for names in on_ranks(_threads_in_training, 2):
        assert set(thread_times.ROLES) <= names
