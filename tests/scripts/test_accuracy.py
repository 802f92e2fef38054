"""`scripts/accuracy.py`: a tiny study against plain DDP, and what it makes of its figures."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import accuracy
import launched
from accuracy_parts import measure, rank, report, samples, summary
from accuracy_parts.rank import CaseSettings
from bench_kit.launch import CaseFailed
from lab import why_no_lab

RUN_TIMEOUT_S = 500
PNG = b"\x89PNG"


def run(given: str, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """The record and what was printed. The pictures are `tmp_path / "accuracy.png"` and `tmp_path / "curves.png"`."""
    json_file = tmp_path / "accuracy.json"
    results = ["--json", json_file, "--png", tmp_path / "accuracy.png", "--curves", tmp_path / "curves.png"]
    output = launched.run(launched.SCRIPTS / "accuracy.py", *given.split(), *results, timeout_s=RUN_TIMEOUT_S)
    return json.loads(json_file.read_text()), output


@pytest.mark.nightly
def test_fp32_trains_as_plain_ddp_does_and_bf16_almost(tmp_path: Path) -> None:
    given = "--wires ddp,fp32,bf16,local-8 --seeds 1 --steps 12 --evaluate-every 4"
    record, output = run(given, tmp_path)
    runs = {(case["task"], case["wire"]): case["runs"][0] for case in record["cases"]}
    for task, samples_of_step in (("digits", 2 * 32), ("text", 2 * 16)):
        ddp, fp32, bf16, local = (runs[task, wire] for wire in ("ddp", "fp32", "bf16", "local-8"))
        assert len(fp32["losses"]) == 12 and fp32["pipelined_steps"] > 3
        for figure in ("losses", "parameters_sha256", "test_loss", "test_accuracy"):
            assert fp32[figure] == ddp[figure]
        for one, other in zip(ddp["held_out"], fp32["held_out"], strict=True):
            assert one | {"train_s": other["train_s"]} == other
        assert fp32["held_out"][-1]["test_loss"] == pytest.approx(fp32["test_loss"], rel=1e-6)
        assert bf16["losses"] == pytest.approx(fp32["losses"], abs=0.3)
        assert bf16["parameters_sha256"] != fp32["parameters_sha256"]
        assert bf16["sent_bytes_per_step"] == pytest.approx(fp32["sent_bytes_per_step"] / 2, rel=0.01)
        assert [point["samples"] for point in local["held_out"]] == [4 * samples_of_step * n for n in (1, 2, 3)]
        times = [0.0, *(point["train_s"] for point in local["held_out"]), local["train_s"]]
        assert times == sorted(times)
    for wire in ("fp32", "bf16"):
        row = next(line.split() for line in output.splitlines() if line.split()[:1] == [wire])
        shown = runs["digits", wire]
        assert row[1] == f"{shown['final_train_loss']:.3f}" and row[-1] == f"{shown['sent_bytes_per_step'] / 1e6:.3f}"
    assert record["configuration"]["cores"] and record["configuration"]["torch"] == torch.__version__
    assert "Held-out loss of the mean over ranks" in output
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("accuracy.png", "curves.png"))


@pytest.mark.nightly
@pytest.mark.skipif(why_no_lab() is not None, reason="needs the rights to build a lab")
def test_held_out_loss_over_time_on_hosts_of_a_lab(tmp_path: Path) -> None:
    given = "--wires fp32,local-8 --tasks digits --seeds 1 --steps 8 --rate 200mbit --delay-ms 5 --evaluate-every 4"
    record, _ = run(given, tmp_path)
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
    def train(_: object, settings: CaseSettings, *__: object) -> list[dict[str, Any]]:
        if settings.wire == "int8":
            raise CaseFailed("parameters differ between ranks")
        return FP32["runs"]

    monkeypatch.setattr(measure, "measure_on_ranks", train)
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
