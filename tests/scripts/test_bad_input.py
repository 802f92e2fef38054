"""Each script refuses what it cannot do before it begins, and names it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import bench
import bench_lease
import demo
import gpu_check
import soak
from accuracy_parts import options as of_accuracy
from bench_lease_parts import cases as of_bench_lease
from bench_parts import options as of_bench
from train_parts import options as of_train

PARSERS: dict[str, Callable[[list[str]], Any]] = {
    "accuracy": partial(of_accuracy.parse_args, ""),
    "bench": partial(of_bench.parse_args, ""),
    "bench_lease": partial(of_bench_lease.parse_args, ""),
    "demo": demo.parse_args,
    "gpu_check": gpu_check.main,
    "soak": soak.main,
    "train": partial(of_train.parse_args, ""),
}
REFUSED = [
    ("accuracy", "--wires fp32,fp8", "fp8: choose from ddp, fp32"),
    ("accuracy", "--tasks words", "words: choose from digits, text"),
    ("accuracy", "--seeds 0", "--seeds"),
    ("accuracy", "--from-json missing.json", "missing.json: no such file"),
    ("accuracy", "--delay-ms 20", "give --rate as well"),
    ("accuracy", "--curves curves.png", "give both"),
    ("accuracy", "--from-json missing.json --steps 3", "--steps has no effect"),
    ("bench", "--arms auto,fast", "'fast'"),
    ("bench", "--arms ddp@0", "ddp@0"),
    ("bench", "--workloads resnet5", "resnet5"),
    ("bench", "--ratios 1,-1", "1,-1"),
    ("bench", "--tokens 33 --workloads transformer", "--tokens 33"),
    ("bench", "--parameters 1000", "1000 parameters"),
    ("bench", "--rounds 0", "--rounds"),
    ("bench", "--arms local-8 --steps-per-round 12", "local-8 shares every 8 steps"),
    ("bench_lease", "--cases equal,odd", "odd"),
    ("bench_lease", "--window-s 0", "--window-s"),
    ("demo", "--model resnet81", "--model resnet81 is none of torchvision's classifiers"),
    ("gpu_check", "--part smok", "--part"),
    ("gpu_check", "--jobs 0", "--jobs"),
    ("gpu_check", "--budget-s 0", "--budget-s"),
    ("soak", "--steps 39", "--steps"),
    ("soak", "--steps many", "--steps"),
    ("train", "--batch-size 0", "--batch-size must be greater than 0, not 0"),
    ("train", "--lr nan", "--lr must be greater than 0, not nan"),
    ("train", "--warmup-epochs -1", "--warmup-epochs must be 0 or more, not -1.0"),
    ("train", "--model resnet81", "--model resnet81 is none of torchvision's classifiers"),
    ("train", "--hook deer", "argument --hook: invalid choice: 'deer'"),
    ("train", "--cache somewhere", "--cache is for the images of --data FOLDER"),
    ("train", "--resume", "--resume needs --checkpoint FILE"),
    ("train", "--checkpoint no.ckpt --resume", "no.ckpt is not there; --resume auto"),
]


@pytest.mark.parametrize(("script", "given", "named"), REFUSED)
def test_bad_input_is_refused_by_name(script: str, given: str, named: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # as under torchrun
    with pytest.raises(SystemExit) as stopped:
        PARSERS[script](given.split())
    assert stopped.value.code == 2 and named in capsys.readouterr().err


@pytest.mark.parametrize("left", [{}, {"LOCAL_RANK": "0"}])
def test_without_torchrun_the_way_to_start_it_is_said(left: dict[str, str], monkeypatch, capsys) -> None:
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        PARSERS["train"]([])
    assert "start it with: torchrun" in capsys.readouterr().err


def test_the_demo_refuses_to_be_started_by_torchrun_on_other_than_its_two_ranks(monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        PARSERS["demo"]([])
    assert "leave torchrun out" in capsys.readouterr().err


@pytest.mark.parametrize(("main", "way_out"), [(bench.main, "--no-lab"), (bench_lease.main, "")])
def test_without_a_lab_it_says_why_and_exits_with_2(main, way_out: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["--quick"]) == 2
    assert "`ip`" in (error := capsys.readouterr().err) and way_out in error
