"""`scripts/demo.py`: a small run of the whole demo, and what it says when DeAR pays, and when it does not."""

import io
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import launched
from bench_kit.slow_link import why_not_here
from demo_parts import report
from demo_parts.arms import Factory, Images
from demo_parts.measure import compare, trace_steps
from demo_parts.progress import Progress

TIMEOUT_S = 280
# What scripts/_venv.sh may print before.
OF_THE_ENVIRONMENT = 8
SMALL = ("--model", "squeezenet1_1", "--image-size", "32", "--batch-size", "4", "--rounds", "1", "--steps", "1")

pytest.importorskip("matplotlib")
from demo_parts import picture  # noqa: E402


@pytest.mark.xdist_group("demo")
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_a_small_demo_is_quiet_and_ends_with_identical_models_a_verdict_and_a_picture(tmp_path: Path) -> None:
    import matplotlib.image

    path, errors = tmp_path / "t.png", tmp_path / "errors"
    files = ("--picture", path, "--json", tmp_path / "demo.json")
    command = (launched.SCRIPTS / "demo.py", "--quick", *SMALL, *files)
    with errors.open("w") as stderr:
        job = launched.start(*command, stderr=stderr)
        shown = launched.finish(job, TIMEOUT_S)
    assert (job.returncode, errors.read_text()) == (0, ""), shown
    assert "Bit-identical" in shown and "best bucket size" in shown and "For your own model" in shown
    assert shown.index(f"First picture, first 1 rounds, lowest to highest: {path}.") < shown.index("Bit-identical")
    assert shown.endswith(f"{path}\n")
    assert len(shown.splitlines()) <= 40 - OF_THE_ENVIRONMENT
    height, width, _ = matplotlib.image.imread(path).shape
    assert width > 1000 and height > 500

    record = json.loads((tmp_path / "demo.json").read_text())
    *trained, alone = record["arms"]
    assert [arm["label"] for arm in (trained[-1], alone)] == ["this (DeAR)", "compute alone"]
    assert sum(arm["label"].endswith(" (best)") for arm in trained[:-1]) == 1
    assert len({arm["loss"] for arm in trained}) == 1
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


def _compare(changed: str | None) -> str:
    images = Images(8, 4)
    factory = Factory(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10), nn.BatchNorm1d(10)), images)
    plain, dear = factory.ddp(None, None), factory.dear(None, tune=False)
    for arm in (plain, dear):
        arm.catch_up(4)
    if changed is not None and dist.get_rank() == 1:
        with torch.no_grad():
            dear.ddp.module.state_dict()[changed].flatten()[:1] += 1e-6
    found = compare([plain, dear]).first_difference
    dear.arm.close()
    return found


@pytest.mark.parametrize("changed", [None, "1.weight", "2.running_mean"])
def test_one_changed_number_on_one_rank_is_a_difference_and_buffers_of_two_ranks_are_none(on_ranks, changed) -> None:
    pytest.importorskip("sklearn")
    expected = "" if changed is None else f"model.{changed}"
    assert on_ranks(_compare, 2, changed) == [expected, expected]


def test_an_arm_that_the_tuner_left_alone_is_traced_as_plain_ddp(on_ranks) -> None:
    pytest.importorskip("sklearn")
    for links, links_left, overlapped in on_ranks(_trace_what_was_left_alone, 2):
        assert (links, links_left, overlapped) == (3, 1, None)


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


def _arms(seconds_of: dict[str, list[float]]) -> tuple[report.Arms, list[list[float]]]:
    """Arms by name, and their times: DDP, DDP with the bucket size of the first rounds, DeAR, compute alone."""
    made = [SimpleNamespace(label=label) for label in seconds_of]
    return report.Arms(*made), list(seconds_of.values())  # type: ignore[arg-type]


def test_ddp_at_its_best_is_what_was_fastest_in_these_rounds_whatever_the_first_rounds_said() -> None:
    arms, times_s = _arms({"DDP": [0.4, 0.4], "DDP, 4 MB": [0.5, 0.6], "DeAR": [0.2, 0.3], "alone": [0.2, 0.2]})
    ddp, other, dear, alone = report.rows(arms, times_s, report.whole_range)
    assert (ddp["label"], other["label"]) == ("DDP (best)", "DDP, 4 MB")
    assert dear["speedup"] == pytest.approx({"median": 5 / 3, "low": 4 / 3, "high": 2.0})
    assert "speedup" not in alone
    assert report.so_far([ddp, other, dear, alone]) == "DeAR is 1.67 times as fast as DDP at its best (1.33 to 2.00)"


@pytest.mark.parametrize("rows", [3, 4])
def test_the_first_picture_has_no_traces(rows: int, tmp_path: Path) -> None:
    import matplotlib.image

    step_s = {"median": 0.3, "low": 0.2, "high": 0.4}
    speedup = {"median": 1.2, "low": 1.1, "high": 1.3}
    figures = [{"label": f"arm {number}", "step_s": step_s, "speedup": speedup} for number in range(rows)]
    picture.draw(figures, "first 2 rounds, lowest to highest", [], tmp_path / "new" / "first.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "new" / "first.png").shape
    assert width > 1000 and height < 600


def test_where_there_is_no_terminal_a_line_says_now_and_then_what_is_done_and_how_long_it_will_take() -> None:
    shown = io.StringIO()
    now = time.time()
    with Progress(Console(file=shown), now - 20, now + 10) as progress:
        progress.doing("first")
        progress.doing("second")
        progress.takes_at_least(5.0)  # there is time for that
        enough_s = progress.left_s()
        progress.takes_at_least(40.0)
        left_s = progress.left_s()
    assert 5 < enough_s <= 10
    assert re.fullmatch(r"first, \d+ s left\n", shown.getvalue())
    assert 10 < left_s <= 40


def test_on_a_terminal_a_bar_has_what_is_done_and_the_seconds_left() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, record=True)
    with Progress(console, time.time(), time.time() + 900) as progress:
        progress.doing("round 1 of 3")
        progress._bar.refresh()
    assert re.search(r"round 1 of 3 .* \d{3} s left", console.file.getvalue())  # type: ignore[attr-defined]


def test_sentences_are_wrapped_between_words_on_a_terminal_and_stay_whole_in_a_file() -> None:
    for is_terminal, lines in ((True, ["one two", "three"]), (False, ["one two three"])):
        shown = io.StringIO()
        report.tell(Console(file=shown, force_terminal=is_terminal, width=10), "one two three")
        assert [line.rstrip() for line in shown.getvalue().splitlines()] == lines
