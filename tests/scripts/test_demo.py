"""`scripts/demo.py`: a small run of the whole demo, and what it says when DeAR pays, and when it does not."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import launched
from bench_kit.slow_link import why_not_here
from demo_parts import report
from demo_parts.arms import Factory, Images
from demo_parts.measure import trace_steps

TIMEOUT_S = 280
SMALL = ("--model", "squeezenet1_1", "--image-size", "32", "--batch-size", "4", "--rounds", "1", "--steps", "1")

pytest.importorskip("matplotlib")


@pytest.mark.xdist_group("demo")
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_a_small_demo_is_quiet_and_ends_with_identical_models_a_verdict_and_a_picture(tmp_path: Path) -> None:
    import matplotlib.image

    picture, errors = tmp_path / "t.png", tmp_path / "errors"
    files = ("--timeline", picture, "--json", tmp_path / "demo.json")
    command = (*launched.torchrun(), launched.SCRIPTS / "demo.py", "--quick", *SMALL, *files)
    with errors.open("w") as stderr:
        job = launched.start(*command, stderr=stderr)
        shown = launched.finish(job, TIMEOUT_S)
    assert (job.returncode, errors.read_text()) == (0, ""), shown
    assert "Bit-identical" in shown and "best bucket size" in shown
    assert shown.endswith(f"{picture}\n")
    height, width, _ = matplotlib.image.imread(picture).shape
    assert width > 1000 and height > 500

    record = json.loads((tmp_path / "demo.json").read_text())
    *trained, alone = record["arms"]
    assert [arm["label"] for arm in (trained[0], trained[-1], alone)] == [trained[0]["label"], "DeAR", "compute alone"]
    assert len({arm["loss"] for arm in trained}) == len({arm["accuracy"] for arm in trained}) == 1
    assert record["comparison"]["first_difference"] == ""
    if why_not_here() is None:
        _both_send_alike_over_one_slow_link(record["link"], trained)


def _trace_what_was_left_alone() -> tuple[int, int, int | None]:
    factory = Factory(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10)), Images(8, 4))
    arm = factory.dear(None, tune=False)
    arm.catch_up(3)
    links = len(arm.links)
    arm.arm.state.detach()
    arm.pace(None)
    return links, len(arm.sent_bytes()), trace_steps(arm, 2).overlapped


def test_an_arm_that_the_tuner_left_alone_is_traced_as_plain_ddp(on_ranks) -> None:
    pytest.importorskip("sklearn")
    for links, links_left, overlapped in on_ranks(_trace_what_was_left_alone, 2):
        assert (links, links_left, overlapped) == (2, 1, None)


def _both_send_alike_over_one_slow_link(link: dict[str, Any], trained: list[dict[str, Any]]) -> None:
    assert link["measured_bytes_per_s"] < 1.5 * link["asked_bytes_per_s"]
    gradient_bytes = link["asked_bytes_per_s"] * link["compute_s"]
    for arm in trained:
        assert {limit for limits in arm["limits_bytes_per_s"] for limit in limits} == {round(link["asked_bytes_per_s"])}
        carriers = [sent for sent in arm["sent_bytes_per_step"] if sent > 0.05 * gradient_bytes]
        assert carriers == [pytest.approx(gradient_bytes, rel=0.1)]


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ([1.19, 1.2, 1.22], "DeAR is 1.20 times as fast as DDP with its best bucket size"),
        ([0.99, 1.0, 1.02], "DeAR makes no clear difference"),
        ([0.7, 1.2, 1.2], "DeAR makes no clear difference"),
        ([0.89, 0.9, 0.91], "DeAR does not pay here: a step takes 11% longer"),
    ],
)
def test_the_verdict_follows_the_figures(rounds: list[float], words: str) -> None:
    over_best = report.speedup(rounds, [1.0, 1.0, 1.0])
    assert report.verdict(over_best, over_best).startswith(words)


def test_a_machine_that_was_disturbed_is_named() -> None:
    assert report.why_figures_mean_little(0.3, 0.33) is None
    for in_rounds_s in (0.1, 0.5):
        assert "busy with other work" in str(report.why_figures_mean_little(0.3, in_rounds_s))


def test_no_slow_link_is_put_into_words() -> None:
    sentence = report.link_sentence({"asked_bytes_per_s": None, "why_not": "only Linux can pace a TCP connection"})
    assert "only Linux can pace" in sentence and "expect no difference" in sentence
