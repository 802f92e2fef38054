"""`python -m ddp_crossover run`: a script that does not know of us trains to the bits of plain DDP."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from scripts_of_users import ROOT, TRAIN, bits, python, torchrun, write_script

pytestmark = pytest.mark.xdist_group("run")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return bits(torchrun(str(write_script(tmp_path_factory.mktemp("plain"))), "x"))


def test_a_script_is_attached_to_and_trains_to_the_same_bits(tmp_path: Path, plain) -> None:
    stats = tmp_path / "stats.json"
    run = ("-m", "ddp_crossover", "run", "--fusion-mb", "0.01", "--stats", str(stats))
    done = torchrun(*run, str(write_script(tmp_path)), "x")
    assert bits(done) == plain
    assert done.stderr.count("attached to Sequential (0.00653 M parameters, 2 ranks) with AdamW") == 1
    [figures] = json.loads(stats.read_text())
    assert figures["model"] == "Sequential" and figures["pipelined_iterations"] > 10 and figures["deferred_steps"] > 10


@pytest.mark.nightly
def test_a_module_whose_workers_are_spawned(tmp_path: Path) -> None:
    write_script(tmp_path)
    arguments = ("-m", "train_it", "--workers")
    plain = torchrun(*arguments, folder=tmp_path)
    done = torchrun("-m", "ddp_crossover", "run", "--fusion-mb", "0.01", *arguments, folder=tmp_path)
    assert bits(done) == bits(plain) and "attached to Sequential" in done.stderr


@pytest.mark.nightly
def test_switched_off_it_is_plain_ddp(tmp_path: Path, plain) -> None:
    done = torchrun("-m", "ddp_crossover", "run", str(write_script(tmp_path)), "x", DDP_CROSSOVER="off")
    assert bits(done) == plain and "ddp_crossover" not in done.stderr


@pytest.mark.nightly
def test_a_model_whose_ddp_is_never_called_is_said_when_a_short_script_ends(tmp_path: Path) -> None:
    text = TRAIN.replace("ddp(x)", "net(x)").replace("range(5)", "range(1)")
    script = str(write_script(tmp_path, text))
    done = torchrun("-m", "ddp_crossover", "run", script)
    assert bits(done) == bits(torchrun(script))
    assert done.stderr.count("nothing is attached to: AdamW.step() at train_it.py:") == 1, done.stderr


@pytest.mark.nightly
def test_two_processes_without_ddp_are_said(tmp_path: Path) -> None:
    done = torchrun(
        "-m", "ddp_crossover", "run", str(write_script(tmp_path, TRAIN.replace("DistributedDataParallel(net)", "net")))
    )
    assert done.stderr.count("nothing is attached to: 2 processes were started") == 1, done.stderr


@pytest.mark.quick
def test_a_script_without_ddp_does_not_notice(tmp_path: Path) -> None:
    text = "import sys; print(__name__, __file__, sys.argv[1:], 'torch' in sys.modules); sys.exit(3)"
    script = str(write_script(tmp_path, text))
    done = python("-m", "ddp_crossover", "run", script, "--epochs", "2")
    assert done.stdout.split() == ["__main__", script, "['--epochs',", "'2']", "False"], done.stderr
    assert done.returncode == 3 and not done.stderr


def test_the_error_of_a_script_is_its_own(tmp_path: Path) -> None:
    script = str(write_script(tmp_path, "def f():\n    raise ValueError('mine')\nf()"))
    done = python("-m", "ddp_crossover", "run", script)
    assert done.returncode == 1
    assert done.stderr == python(script).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script was given"),
        (["no_such.py"], "there is no script no_such.py"),
        (["--tuned-file", "x.json", "--fusion-mb", "2", "train.py"], "tuned_file keeps the group size"),
    ],
)
def test_bad_input_is_refused(arguments, message) -> None:
    done = python("-m", "ddp_crossover", "run", *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.nightly
def test_what_cannot_be_attached_to_trains_as_plain_ddp(tmp_path: Path) -> None:
    text = TRAIN.replace("torch.optim.AdamW(ddp.parameters(), lr=1e-2)", "torch.optim.LBFGS(ddp.parameters())").replace(
        "optimizer.step()", "optimizer.step(lambda: loss)"
    )
    script = str(write_script(tmp_path, text))
    done = torchrun("-m", "ddp_crossover", "run", script)
    assert bits(done) == bits(torchrun(script))
    assert done.stderr.count("Sequential trains as plain DDP: LBFGS evaluates the model several times") == 1


def test_an_empty_entry_of_the_path_stays_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("print('imported')")
    folder = tmp_path / "scripts of mine"
    folder.mkdir()
    script = write_script(folder, "import beside")
    path = os.pathsep.join(["", str(ROOT)])
    done = python("-m", "ddp_crossover", "run", str(script), folder=tmp_path, PYTHONPATH=path)
    assert done.stdout == "imported\n", done.stderr
