"""`scripts/train.py` as users start it: DeAR against DDP, resuming after a crash, a cache, what it refuses.

Each job is a real torchrun of two ranks on gloo, as small as it can be and still have BatchNorm, dropout and several
buckets.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import launched
import train
from pictures import make_folder
from train_parts import checkpoint, data, options

JOB_TIMEOUT_S = 450
SMALL = (
    "--device", "cpu", "--model", "mobilenet_v3_small", "--epochs", "3",
    "--limit-samples", "64", "--batch-size", "8", "--accumulate", "2",
)  # fmt: skip


class Run(NamedTuple):
    """What a job left behind."""

    record: dict[str, Any]
    params: dict[str, torch.Tensor]
    output: str


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start a job of two ranks in the background."""
    return launched.start(*launched.torchrun(), launched.SCRIPTS / "train.py", *SMALL, *arguments)


def run(stem: Path, *arguments: object) -> Run:
    """Run a job to its end, which must be a good one."""
    job = start(*arguments, "--json", f"{stem}.json", "--save-params", f"{stem}.pt")
    output = launched.finish(job, JOB_TIMEOUT_S)
    assert job.returncode == 0, output
    record = json.loads(Path(f"{stem}.json").read_text())
    return Run(record, torch.load(f"{stem}.pt", weights_only=True), output)


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    """The process ids of the ranks that torchrun has started (Linux)."""
    return [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]


def assert_bit_identical(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"{len(different)} of {len(left)} tensors differ, first {different[0]}"


@pytest.mark.nightly
@pytest.mark.timeout(5 * JOB_TIMEOUT_S)
def test_dear_trains_to_the_bits_of_ddp_and_goes_on_to_them_after_a_kill(tmp_path: Path) -> None:
    ddp_run, dear_run = run(tmp_path / "none", "--hook", "none"), run(tmp_path / "dear", "--hook", "dear")
    resumed = _kill_and_resume(tmp_path / "job.ckpt")
    assert "resumed from" in resumed.output
    for other in (dear_run, resumed):
        assert_bit_identical(ddp_run.params, other.params)
    ddp, dear = ddp_run.record, dear_run.record
    assert len({*ddp["parameters_sha256"], *dear["parameters_sha256"]}) == 1
    for key in ("loss", "accuracy", "learning_rate"):
        assert [e[key] for e in ddp["epochs"]] == [e[key] for e in dear["epochs"]]
    assert [e["loss"] for e in ddp["epochs"]] == [e["loss"] for e in resumed.record["epochs"]]
    for record in (ddp, dear):
        assert record["samples_per_s"] > 0
        assert record["exposed_s_per_step"] >= 0


def _kill_and_resume(saved: Path) -> Run:
    """Kill a rank as soon as there is a checkpoint, and go on from that in another job."""
    job = start("--hook", "dear", "--checkpoint", saved)
    give_up_at = time.monotonic() + JOB_TIMEOUT_S
    while not saved.exists() and job.poll() is None and time.monotonic() < give_up_at:
        time.sleep(0.01)
    if job.poll() is None:
        os.kill(ranks_of(job)[-1], signal.SIGKILL)
    output = launched.finish(job, JOB_TIMEOUT_S)
    assert saved.exists(), output
    assert job.returncode != 0, output
    return run(saved.parent / "resumed", "--hook", "dear", "--checkpoint", saved, "--resume")


def test_a_folder_without_its_two_parts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match="has no folder val"):
        data.load_image_folder(tmp_path, 32)
    (tmp_path / "val").mkdir()
    with pytest.raises(ValueError, match="Couldn't find any class folder"):
        data.load_image_folder(tmp_path, 32)


@pytest.mark.parametrize(
    ("model", "message"),
    [("alexnet", "Give another --image-size"), ("googlenet", "auxiliary outputs")],
)
@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_a_model_that_images_do_not_fit_is_refused(model: str, message: str) -> None:
    size = 32 if model == "alexnet" else 64
    with pytest.raises(ValueError, match=message):
        train.build_model(model, classes=10, image_size=size)


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):  # as under torchrun
        monkeypatch.setenv(name, value)
    path = tmp_path / "job.ckpt"
    config = vars(options.parse_args("", []))
    checkpoint.save(path, {"history": []}, config)
    assert checkpoint.load(path, config)["history"] == []
    with pytest.raises(ValueError, match="made with seed 0, and this run has 1"):
        checkpoint.load(path, config | {"seed": 1})
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read: it is damaged"):
        checkpoint.load(path, config)


@pytest.mark.nightly
def test_a_cache_of_decoded_images_changes_no_bit(tmp_path: Path) -> None:
    for part in ("train", "val"):
        make_folder(tmp_path / "images" / part, 48)
    images = ("--data", tmp_path / "images", "--image-size", "32", "--shrink", "36", "--epochs", "2")
    without = run(tmp_path / "without", *images)
    for stem in ("filling", "full"):
        cached = run(tmp_path / stem, *images, "--cache", tmp_path / "cache")
        assert_bit_identical(without.params, cached.params)
    assert len(list((tmp_path / "cache").iterdir())) == 2  # of training and of test images
