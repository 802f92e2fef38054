"""`scripts/accuracy.py`: a tiny study against plain DDP, what it makes of its figures, bad input."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import accuracy
from accuracy_parts import measure, options, rank, report, samples, summary
from accuracy_parts.rank import CaseSettings
from accuracy_parts.wires import DEFAULT_WIRES, WIRES
from bench_kit.launch import CaseFailed
from lab import why_no_lab

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 240
PNG = b"\x89PNG"


def run(given: str, tmp_path: Path) -> tuple[int, dict[str, Any], str]:
    """The exit code, the record and what was printed. The picture is `tmp_path / "accuracy.png"`."""
    json_file = tmp_path / "accuracy.json"
    results = ["--json", str(json_file), "--png", str(tmp_path / "accuracy.png")]
    job = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "accuracy.py"), *given.split(), *results],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = job.communicate(timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        job.terminate()  # it ends its ranks
        output, _ = job.communicate()
        pytest.fail(f"no end within {RUN_TIMEOUT_S} s:\n{output}")
    assert json_file.exists(), output
    return job.returncode, json.loads(json_file.read_text()), output


def check_same_bits(ddp: dict[str, Any], fp32: dict[str, Any]) -> None:
    assert len(fp32["losses"]) == 12 and fp32["pipelined_steps"] > 3
    for figure in ("losses", "parameters_sha256", "test_loss", "test_accuracy"):
        assert fp32[figure] == ddp[figure]


@pytest.mark.nightly
def test_fp32_trains_digits_as_plain_ddp_does_and_bf16_almost(tmp_path: Path) -> None:
    code, record, output = run("--wires ddp,fp32,bf16 --tasks digits --seeds 1 --steps 12", tmp_path)
    assert code == 0, output
    ddp, fp32, bf16 = ({**case["runs"][0], "wire": case["wire"]} for case in record["cases"])
    check_same_bits(ddp, fp32)
    assert bf16["losses"] == pytest.approx(fp32["losses"], abs=0.3)
    assert bf16["parameters_sha256"] != fp32["parameters_sha256"]
    assert bf16["sent_bytes_per_step"] == pytest.approx(fp32["sent_bytes_per_step"] / 2, rel=0.01)
    assert record["configuration"]["cores"] and record["configuration"]["torch"] == torch.__version__
    for run_of in (fp32, bf16):
        row = next(line.split() for line in output.splitlines() if line.split()[:1] == [run_of["wire"]])
        assert row[1] == f"{run_of['final_train_loss']:.3f}" and row[-1] == f"{run_of['sent_bytes_per_step'] / 1e6:.3f}"
    assert (tmp_path / "accuracy.png").read_bytes().startswith(PNG)


@pytest.mark.nightly
def test_fp32_trains_text_as_plain_ddp_does(tmp_path: Path) -> None:
    curves = tmp_path / "curves.png"
    given = f"--wires ddp,fp32,local-8 --tasks text --seeds 1 --steps 12 --evaluate-every 4 --curves {curves}"
    code, record, output = run(given, tmp_path)
    assert code == 0, output
    ddp, fp32, local = (case["runs"][0] for case in record["cases"])
    check_same_bits(ddp, fp32)
    for one, other in zip(ddp["held_out"], fp32["held_out"], strict=True):
        assert one | {"train_s": other["train_s"]} == other
    assert [point["samples"] for point in local["held_out"]] == [128, 256, 384]
    times = [0.0, *(point["train_s"] for point in local["held_out"]), local["train_s"]]
    assert times == sorted(times)
    assert fp32["held_out"][-1]["test_loss"] == pytest.approx(fp32["test_loss"], rel=1e-6)
    assert curves.read_bytes().startswith(PNG) and "Held-out loss of the mean over ranks" in output


@pytest.mark.nightly
@pytest.mark.skipif(why_no_lab() is not None, reason="needs the rights to build a lab")
def test_held_out_loss_over_time_on_hosts_of_a_lab(tmp_path: Path) -> None:
    given = "--wires fp32,local-8 --tasks digits --seeds 1 --steps 8 --rate 200mbit --delay-ms 5 --evaluate-every 4"
    code, record, output = run(given, tmp_path)
    assert code == 0, output
    assert "send at most 200mbit and packets arrive 5 ms later" in record["configuration"]["network"]
    for case in record["cases"]:
        first, last = case["runs"][0]["held_out"]
        assert 0 < first["train_s"] < last["train_s"] and last["steps"] == 8


def test_a_curve_has_a_loss_between_its_points() -> None:
    runs = [
        [{"samples": 10, "train_s": 1.0, "test_loss": 3.0}, {"samples": 20, "train_s": 3.0, "test_loss": loss}]
        for loss in (1.0, 3.0)
    ]
    points = summary.held_out({"runs": [{"held_out": run} for run in runs]})
    assert points == [(10, 1.0, 3.0), (20, 3.0, 2.0)]
    assert summary.first_with(points, 2.5) == (15, 2.0, 2.5)
    assert summary.first_with(points, 1.0) is None
    assert summary.held_out(FP32) == []


def test_a_wire_that_fails_is_named_and_the_others_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def train(settings: CaseSettings, *_: object) -> list[dict[str, Any]]:
        if settings.wire == "int8":
            raise CaseFailed("parameters differ between ranks")
        return FP32["runs"]

    monkeypatch.setattr(measure, "train", train)
    json_file = tmp_path / "accuracy.json"
    given = ["--wires", "int8,fp32", "--tasks", "digits", "--steps", "2", "--seeds", "2", "--json", str(json_file)]
    assert accuracy.main(given) == 1
    failed, trained = json.loads(json_file.read_text())["cases"]
    assert failed["failed"] == "parameters differ between ranks" and not failed["runs"] and trained["runs"]
    output = capsys.readouterr()
    assert "digits, int8: failed" in output.out and "digits, int8: parameters differ" in output.err


def test_too_few_steps_for_the_pipeline_are_an_error() -> None:
    figures = SimpleNamespace(pipelined_iterations=0, fallbacks={"warm-up": 2})
    state = SimpleNamespace(stats=lambda: figures, detached=False)
    with pytest.raises(RuntimeError, match="give more --steps"):
        rank.pipeline_facts(state)


def case(wire: str, *runs: tuple[list[float | None], float | None, float], task: str = "digits") -> dict[str, Any]:
    return {
        "task": task, "wire": wire, "steps": len(runs[0][0]), "failed": None,
        "runs": [
            {"losses": losses, "final_train_loss": losses[-1], "test_loss": test_loss, "test_accuracy": accuracy}
            for losses, test_loss, accuracy in runs
        ],
    }  # fmt: skip


FP32 = case("fp32", ([3.0, 1.0], 0.5, 0.90), ([2.0, 2.0], 1.5, 0.80))
INT8 = case("int8", ([3.0, 2.0], 0.75, 0.85), ([2.0, 4.0], 1.75, 0.85))
DIVERGED = case("topk-noef", ([3.0, None], None, 0.1), ([3.0, None], None, 0.1))
RECORD: dict[str, Any] = {"configuration": {"ranks": 2, "seeds": 2}, "cases": [FP32, INT8, DIVERGED]}


def test_figures_are_compared_with_the_same_seed() -> None:
    cases = RECORD["cases"]
    assert summary.spread(INT8, cases, "test_loss") == (1.25, 0.75, 1.75, 0.25)
    assert summary.spread(FP32, cases, "test_loss") == (1.0, 0.5, 1.5, None)
    assert summary.spread(INT8, [INT8], "test_loss").to_reference is None
    assert all(map(math.isnan, summary.spread(DIVERGED, cases, "test_loss")))
    assert summary.curve(FP32) == ([2.5, 1.5], [2.0, 1.0], [3.0, 2.0])


def test_the_table_fits_100_columns() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    report.print_tables(console, RECORD)
    lines = console.export_text().splitlines()
    assert "…" not in "".join(lines) and all(len(line) <= 100 for line in lines)
    row = next(line.split() for line in lines if line.split()[:1] == ["int8"])
    assert row == ["int8", "3.000", "+1.500", "1.250", "+0.250", "85.0", "+0.0"]


def test_a_record_is_drawn_again_also_where_a_wire_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, png_file = tmp_path / "accuracy.json", tmp_path / "again" / "accuracy.png"
    json_file.write_text(json.dumps(RECORD))
    assert accuracy.main(["--from-json", str(json_file), "--png", str(png_file)]) == 0
    assert png_file.read_bytes().startswith(PNG) and "topk-noef" in capsys.readouterr().out


def test_by_default_all_wires_are_trained_that_answer_the_question() -> None:
    relaxed = {name for name, wire in WIRES.items() if wire.is_relaxed}
    assert set(WIRES) - set(DEFAULT_WIRES) == {"ddp", "unequal", *relaxed}


def test_ranks_share_each_batch_and_an_epoch_repeats_nothing() -> None:
    numbers = samples.Samples(torch.arange(24), torch.arange(24))
    taken = [
        samples.batch(numbers, step, 0, batch_size=3, rank=rank, world_size=2).inputs
        for step in range(4)
        for rank in range(2)
    ]
    assert sorted(torch.cat(taken).tolist()) == list(range(24))
    with pytest.raises(ValueError, match="fewer --ranks"):
        samples.batch(numbers, 0, 0, batch_size=13, rank=0, world_size=2)


def test_the_learning_rate_warms_up_and_ends_near_zero() -> None:
    factors = [rank.learning_rate_factor(step, 100) for step in range(100)]
    assert factors[0] == 0.2 and factors[4] == factors[5] == 1.0 and 0 < factors[-1] < 0.001


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--wires fp32,fp8", "fp8: choose from ddp, fp32"),
        ("--tasks words", "words: choose from digits, text"),
        ("--seeds 0", "--seeds"),
        ("--from-json missing.json", "missing.json: no such file"),
        ("--delay-ms 20", "give --rate as well"),
        ("--curves curves.png", "give both"),
        ("--from-json missing.json --steps 3", "--steps has no effect"),
    ],
)
def test_bad_input_is_refused_by_name(given: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_of:
        options.parse_args("", given.split())
    assert exit_of.value.code == 2 and named in capsys.readouterr().err
