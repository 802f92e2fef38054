"""`python -m ddp_crossover simulate`, as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_crossover import cli
from ddp_crossover.fusion import GradientSpec
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel
from ddp_crossover.plan.model_profile import ModelProfile

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 200


def predictions(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert cli.main(["simulate", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_names_every_schedule_and_that_the_model_is_made_up() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "ddp_crossover", "simulate", "--world-sizes", "2,8", "--fusion-mb", "4"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "140"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert finished.returncode == 0, finished.stderr
    for words in ("synthetic", "allreduce", "dear", "auto", "limit", "25.6 M", "9.41 Gb/s"):
        assert words in finished.stdout
    rows = [line.split()[0] for line in finished.stdout.splitlines() if "(4)" in line]
    assert rows == ["2", "8"]


def test_json_holds_a_prediction_for_every_world_size(capsys) -> None:
    report = predictions(
        capsys, "--profile", "uniform", "--link", "25g", "--world-sizes", "2,16,1024", "--fusion-mb", "4"
    )
    assert report["synthetic"] is True
    assert [row["world_size"] for row in report["predictions"]] == [2, 16, 1024]
    for row in report["predictions"]:
        assert set(row["schedules"]) == {"allreduce", "dear", "auto"}
        for step in row["schedules"].values():
            assert step["step_s"] >= row["limit_s"] - 1e-9
            assert step["step_s"] == pytest.approx(report["compute_s"] + step["exposed_s"])
            assert step["fusion_mb"] == 4.0
    only = predictions(capsys, "--schedule", "dear", "--world-sizes", "4")
    assert set(only["predictions"][0]["schedules"]) == {"dear"}


def test_a_profile_file_brings_its_parameters_times_and_link(capsys, tmp_path) -> None:
    link = LinkModel(latency_s=1e-3, per_leg_s=2e-4, s_per_byte=8e-9)
    profile = ModelProfile(
        specs=tuple(GradientSpec(f"layer{i}", 100_000, 4, "float32") for i in range(10)),
        compute=ComputeProfile(
            use_s=tuple(i * 0.01 for i in range(10)),
            arrival_s=tuple((10 - i) * 0.02 for i in range(10)),
            forward_s=0.1,
            backward_s=0.2,
            rest_s=0.01,
        ),
        link=link,
        world_size=3,
    )
    path = tmp_path / "profile.json"
    profile.save(path)
    assert ModelProfile.load(path) == profile
    report = predictions(capsys, "--profile", str(path), "--world-sizes", "3")
    assert report["synthetic"] is False
    assert report["link"] == link.to_json()
    assert report["parameters"] == 1_000_000
    # At the number of ranks it was measured with, the link is as measured.
    assert report["predictions"][0]["communication_s"] == pytest.approx(2 * link.leg_s(4_000_000, 3))
    # A link that is named goes before.
    report = predictions(capsys, "--profile", str(path), "--link", "25g", "--world-sizes", "2")
    assert report["link"] == LinkModel.preset("25g").to_json()


def test_a_ring_pays_latency_per_hop_and_direct_exchange_overhead_per_peer(capsys) -> None:
    wire_s = {}
    for exchange in ("peer", "ring"):
        report = predictions(capsys, "--exchange", exchange, "--world-sizes", "2,101", "--fusion-mb", "64")
        wire_s[exchange] = [row["communication_s"] for row in report["predictions"]]
    assert wire_s["peer"][0] == wire_s["ring"][0]
    assert wire_s["peer"][1] == pytest.approx(wire_s["ring"][1] + 2 * 99 * 30e-6)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "not a profile file"),
        ("[]", "not a profile file"),
        ('{"parameters": []}', "compute"),
        (
            '{"parameters": [], "compute": {"use_s": [0], "arrival_s": [0], '
            '"forward_s": 1, "backward_s": 1, "rest_s": 0}}',
            "it has 0 parameters and times for 1",
        ),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(capsys, tmp_path, content, words) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["simulate", "--profile", str(path)]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "profile.json" in message


@pytest.mark.parametrize("arguments", [["--world-sizes", "1,2"], ["--world-sizes", "two"], ["--schedule", "best"]])
def test_a_bad_option_is_refused(capsys, arguments) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["simulate", *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err
