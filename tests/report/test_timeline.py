"""`timeline` draws real traces, and says clearly what is missing when it cannot."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ddp_crossover import cli
from traced_job import traced

pytest.importorskip("matplotlib")


def run(*words: str) -> int:
    return cli.main(["timeline", *map(str, words)])


@pytest.fixture
def traces(on_ranks, tmp_path) -> Path:
    for with_dear in (False, True):
        on_ranks(traced, 2, with_dear, str(tmp_path))
    return tmp_path


def test_two_traces_become_one_picture(traces, capsys) -> None:
    import matplotlib.image

    picture = traces / "timeline.png"
    names = [traces / f"{with_dear}-rank1.json" for with_dear in (False, True)]
    assert run(*names, "-o", picture, "--steps", "2") == 0
    height, width, _ = matplotlib.image.imread(picture).shape
    assert 1000 < width < 3000 and 500 < height < 2000
    told = capsys.readouterr().out
    assert "plain DDP, rank 1: " in told and "ms per step" in told
    assert re.search(r"schedule auto, groups of up to \d\S* (B|KiB), rank 1: ", told)


def test_what_cannot_be_drawn_is_said(traces, capsys, monkeypatch) -> None:
    trace = traces / "True-rank0.json"
    for words, message in (
        ((traces / "none.json",), "No such file"),
        ((trace, "--steps", "100"), "3 complete steps, not 100"),
        ((trace, "--steps", "0"), "--steps"),
    ):
        assert run(*words, "-o", traces / "x.png") == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(trace, "-o", traces / "x.png") == 2
    assert "pip install ddp_crossover[plot]" in capsys.readouterr().err
    assert not (traces / "x.png").exists()
