"""What `verify` makes of records: nothing that differs passes for rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_crossover.addons.launch.compare import compare, why_different

MODEL = {
    "overlapped_steps": 1,
    "finished_steps": 1,
    "iterations": 1,
    "pipelined_iterations": 1,
    "fallbacks": {},
    "obstacles": {},
    "by_script": False,
}


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
    return folder / "0.json"


@pytest.mark.parametrize(
    ("weight", "exit_status"),
    [([1.0, 1.0], 0), ([1.0, 1.00001], 0), ([1.0, 1.1], 1), ([1.0, float("nan")], 1), ([1.0, float("inf")], 1)],
)
def test_only_values_that_are_close_are_within_rounding(tmp_path: Path, weight, exit_status) -> None:
    plain, again = _write(tmp_path / "plain", [1.0, 1.0]), _write(tmp_path / "again", [1.0, 1.0])
    assert compare(plain, _write(tmp_path / "ours", weight), again, {}).exit_status == exit_status


def test_another_number_of_losses_is_not_within_rounding(tmp_path: Path) -> None:
    plain, again = _write(tmp_path / "plain", [1.0, 1.0]), _write(tmp_path / "again", [1.0, 1.0])
    assert compare(plain, _write(tmp_path / "ours", [1.0, 1.0], losses=[1.0, 2.0]), again, {}).exit_status == 1


def test_optimizers_with_states_of_the_same_name_are_all_compared(tmp_path: Path) -> None:
    states = [{"SGD: step of parameter 0": "1"}, {"SGD: step of parameter 0": "2"}]
    others = [{"SGD: step of parameter 0": "3"}, {"SGD: step of parameter 0": "2"}]
    same = [_write(tmp_path / name, [1.0, 1.0], optimizers=states, sums_may_round=False) for name in ("one", "two")]
    ours = _write(tmp_path / "ours", [1.0, 1.0], optimizers=others, sums_may_round=False)
    verdict = compare(same[0], ours, same[1], {})
    assert verdict.exit_status == 1 and "optimizer 1, SGD: step of parameter 0" in verdict.text


def test_it_says_when_too_few_steps_overlapped_to_mean_much(tmp_path: Path) -> None:
    plain, again = _write(tmp_path / "plain", [1.0]), _write(tmp_path / "again", [1.0])
    verdict = compare(plain, _write(tmp_path / "ours", [1.0]), again, {})
    assert verdict.text.endswith("1 of 1 steps hid their all-gathers)")
    plain_as_well = compare(plain, _write(tmp_path / "tuned", [1.0], models=[MODEL | {"iterations": 4}]), again, {})
    assert plain_as_well.text.endswith("1 of 1 steps hid their all-gathers, 3 more were plain all-reduces)")
    longer = [
        _write(tmp_path / name, [1.0], before_steps=[{}] * 5) for name in ("long plain", "long tuned", "long again")
    ]
    assert compare(*longer, {}).text.endswith(", and DDP was left alone in the other 4: with --fusion-mb 8 it is not)")
    waits = MODEL | {"overlapped_steps": 1, "finished_steps": 3, "obstacles": {"train.py:3 clips": 2}}
    weak = compare(plain, _write(tmp_path / "waits", [1.0], models=[waits]), again, {})
    assert weak.exit_status == 0 and weak.text.endswith("a run whose steps do; train.py:3 clips (2 times)")


@pytest.mark.parametrize(
    ("options", "exit_status", "said"),
    [
        ({}, 1, "DIFFERENT from plain DDP: w (parameters) at the end; parameters differ from plain DDP's by up to"),
        ({"norms": "sharded"}, 0, "within rounding, which is expected because with norms='sharded' the last bits"),
        ({"wire_dtype": "int8"}, 2, "a difference is expected with wire_dtype=int8, and of any size"),
    ],
)
def test_a_difference_that_an_option_makes_is_expected(tmp_path: Path, options, exit_status, said) -> None:
    same = [_write(tmp_path / name, [1.0, 1.0], sums_may_round=False) for name in ("one", "two")]
    verdict = compare(same[0], _write(tmp_path / "ours", [1.0, 1.00001], sums_may_round=False), same[1], options)
    assert verdict.exit_status == exit_status and verdict.text.startswith(said)
    assert "1.0e-05" in verdict.text and "w (parameters)" in verdict.text


def test_a_large_difference_is_not_taken_for_what_norms_make(tmp_path: Path) -> None:
    same = [_write(tmp_path / name, [1.0, 1.0], sums_may_round=False) for name in ("one", "two")]
    ours = _write(tmp_path / "ours", [1.0, 1.1], sums_may_round=False)
    verdict = compare(same[0], ours, same[1], {"norms": "sharded"})
    assert verdict.exit_status == 1 and "more than rounding explains, although with norms='sharded'" in verdict.text


def test_a_script_that_attaches_by_itself_is_said_to(tmp_path: Path) -> None:
    plain, again = _write(tmp_path / "plain", [1.0]), _write(tmp_path / "again", [1.0])
    own = _write(tmp_path / "ours", [1.0], models=[MODEL | {"by_script": True}])
    assert compare(plain, own, again, {}).text.startswith("The script attaches by itself; plain is with")


def test_parameters_that_ranks_have_differently_are_named() -> None:
    assert why_different([{"a": "1", "b": "2"}]) is None
    assert why_different([{"a": "1", "b": "2"}, {"a": "1", "b": "2"}]) is None
    said = why_different([{"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0", "c": "0"}])
    assert said is not None and "different parameters: gradients of b and 1 more were never reduced" in said
    assert why_different([{"a": "1"}, {"a": "0"}], "why") == "The ranks have different parameters (a): why."
    assert why_different([{"a": "1"}, {"a": "1"}], "why") is None
