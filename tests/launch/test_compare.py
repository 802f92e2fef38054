"""What `verify` makes of records: nothing that differs passes for rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_crossover.launch.compare import compare

MODEL = {"overlapped_steps": 1, "finished_steps": 1, "pipelined_iterations": 1, "fallbacks": {}, "obstacles": {}}


def _write(folder: Path, weight: list[float], **other: Any) -> Path:
    folder.mkdir()
    record = {
        "losses": [1.0],
        "before_steps": [{}],
        "parameters": {"w": str(weight), "b": "0"},
        "buffers": {},
        "optimizers": [],
        "sums_are_in_rank_order": False,
        "sums_may_round": True,
        "models": [MODEL],
    }
    (folder / "0.json").write_text(json.dumps(record | other))
    torch.save({"b": torch.zeros(1), "w": torch.tensor(weight)}, folder / "0.pt")
    return folder


@pytest.mark.parametrize(
    ("weight", "exit_status"),
    [([1.0, 1.0], 0), ([1.0, 1.00001], 0), ([1.0, 1.1], 1), ([1.0, float("nan")], 1), ([1.0, float("inf")], 1)],
)
def test_only_values_that_are_close_are_within_rounding(tmp_path: Path, weight, exit_status) -> None:
    plain, again = _write(tmp_path / "plain", [1.0, 1.0]), _write(tmp_path / "again", [1.0, 1.0])
    assert compare(plain, _write(tmp_path / "ours", weight), again, 0).exit_status == exit_status


def test_another_number_of_losses_is_not_within_rounding(tmp_path: Path) -> None:
    plain, again = _write(tmp_path / "plain", [1.0, 1.0]), _write(tmp_path / "again", [1.0, 1.0])
    assert compare(plain, _write(tmp_path / "ours", [1.0, 1.0], losses=[1.0, 2.0]), again, 0).exit_status == 1


def test_optimizers_with_states_of_the_same_name_are_all_compared(tmp_path: Path) -> None:
    states = [{"SGD: step of parameter 0": "1"}, {"SGD: step of parameter 0": "2"}]
    others = [{"SGD: step of parameter 0": "3"}, {"SGD: step of parameter 0": "2"}]
    same = [_write(tmp_path / name, [1.0, 1.0], optimizers=states, sums_may_round=False) for name in ("one", "two")]
    ours = _write(tmp_path / "ours", [1.0, 1.0], optimizers=others, sums_may_round=False)
    verdict = compare(same[0], ours, same[1], 0)
    assert verdict.exit_status == 1 and "optimizer 1, SGD: step of parameter 0" in verdict.text


def test_it_says_when_too_few_steps_overlapped_to_mean_much(tmp_path: Path) -> None:
    plain, again = _write(tmp_path / "plain", [1.0]), _write(tmp_path / "again", [1.0])
    verdict = compare(plain, _write(tmp_path / "ours", [1.0]), again, 0)
    assert verdict.text.endswith("1 of 1 pipelined steps overlapped)")
    waits = MODEL | {"overlapped_steps": 1, "finished_steps": 3, "obstacles": {"train.py:3 clips": 2}}
    weak = compare(plain, _write(tmp_path / "waits", [1.0], models=[waits]), again, 0)
    assert weak.exit_status == 0 and weak.text.endswith("a run whose steps do; train.py:3 clips (2 times)")
