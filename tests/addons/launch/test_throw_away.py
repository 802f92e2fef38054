"""A copy of all files is thrown away with all that a script has written, under whatever path."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts_of_users import TRAIN, environment_of_user, torchrun, torchrun_command, write_script

from ddp_crossover.addons.launch.throw_away import inside, throw_away_copy

VERIFY = ("-m", "ddp_crossover", "verify", "--steps", "15", "--fusion-mb", "0.01")
WITHOUT_MOUNTS = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch) -> Iterator[dict[Path, tuple[bytes, int]]]:
    """A working folder, and files in it and elsewhere, that must be as they were when the test is over."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for path in (here / "log.txt", elsewhere / "best.pt"):
        path.parent.mkdir()
        path.write_text("of yesterday\n")
    monkeypatch.chdir(here)

    def found() -> dict[Path, tuple[bytes, int]]:
        return {
            path: (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
            for folder in (here, elsewhere)
            for path in (folder, *folder.rglob("*"))
        }

    before = found()
    yield before
    assert found() == before


def _has_copies(folder: Path) -> bool:
    try:
        with throw_away_copy(folder):
            return True
    except OSError:
        return False


def _shell(pid: int, command: str) -> str:
    return subprocess.run(inside(pid, ["sh", "-ec", command]), check=True, capture_output=True, text=True).stdout


def test_what_is_written_is_seen_in_the_copy_only(tmp_path: Path, files) -> None:
    real = tmp_path / "real"
    real.mkdir()
    if not _has_copies(real):
        pytest.skip("no copies on this system")
    with throw_away_copy(real) as pid:
        _shell(pid, "echo new >> log.txt; echo more > new.txt; rm ../elsewhere/best.pt; mkdir ../elsewhere/run")
        assert (
            _shell(pid, "cat log.txt new.txt; ls ../elsewhere; pwd") == f"of yesterday\nnew\nmore\nrun\n{Path.cwd()}\n"
        )
        _shell(pid, f"echo found > {real}/result")
    assert (real / "result").read_text() == "found\n"
    with throw_away_copy(real) as pid:
        assert _shell(pid, "ls") == "log.txt\n"


def test_sockets_are_the_real_ones(tmp_path: Path, files) -> None:
    if not _has_copies(tmp_path):
        pytest.skip("no copies on this system")
    connect = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        (tmp_path / "real").mkdir()
        with throw_away_copy(tmp_path / "real") as pid:
            subprocess.run(inside(pid, [sys.executable, "-c", connect, str(tmp_path / "socket")]), check=True)


def test_a_proc_of_a_chroot_is_the_real_one(tmp_path: Path, files) -> None:
    if not _has_copies(tmp_path) or os.geteuid() or not shutil.which("unshare"):
        pytest.skip("needs root that can mount")
    (tmp_path / "chroot" / "proc").mkdir(parents=True)
    program = MAKES_ONE.format(real=str(tmp_path / "real"))
    program = program.replace("cat log.txt;", f"cat log.txt {tmp_path}/chroot/proc/self/comm;")
    mounts = f'mount -t proc proc {tmp_path}/chroot/proc && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounts, sys.executable, program],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout == "of yesterday\nnew\ncat\n", done.stderr


def _without_mounts(program: str) -> subprocess.CompletedProcess[str]:
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("needs root that can lay privileges down")
    command = [*WITHOUT_MOUNTS, sys.executable, "-c", program]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


MAKES_ONE = """
import subprocess
from pathlib import Path
from ddp_crossover.addons.launch.throw_away import inside, throw_away_copy
Path({real!r}).mkdir()
with throw_away_copy(Path({real!r})) as pid:
    command = "echo new >> log.txt; echo x > {real}/result; cat log.txt; rm ../elsewhere/best.pt"
    subprocess.run(inside(pid, ["sh", "-ec", command]), check=True)
"""


def test_a_process_without_privileges_has_a_copy_in_a_user_namespace(tmp_path: Path, files) -> None:
    done = _without_mounts(MAKES_ONE.format(real=str(tmp_path / "real")))
    if "Operation not permitted" in done.stderr:
        pytest.skip("no user namespaces on this system")
    assert done.stdout == "of yesterday\nnew\n" and (tmp_path / "real" / "result").exists(), done.stderr


def test_it_is_said_why_there_is_no_copy(tmp_path: Path, files) -> None:
    if not os.geteuid():
        os.chown(Path.cwd(), 1234, 1234)
    done = _without_mounts(MAKES_ONE.format(real=str(tmp_path / "real")))
    assert "OSError: the working folder belongs to another user or group" in done.stderr


SAVES = """
            if dist.get_rank() == 0:
                torch.save(net.state_dict(), os.environ["BEST"])
                with open("log.txt", "a") as log:
                    print(len(losses), file=log)
            dist.barrier()
            assert os.path.getsize(os.environ["BEST"]) > 1000  # the other rank has written it
"""


def test_verify_leaves_files_as_they_were(tmp_path: Path, files) -> None:
    if not _has_copies(tmp_path):
        pytest.skip("no copies on this system")
    text = TRAIN.replace("            losses.append(loss)\n", "            losses.append(loss)\n" + SAVES)
    script = write_script(tmp_path, text)
    done = torchrun(*VERIFY, str(script), folder=Path.cwd(), BEST=str(tmp_path / "elsewhere" / "best.pt"))
    assert done.returncode == 0 and "bit for bit" in done.stdout, done.stdout + done.stderr
    assert "for real" not in done.stderr


@pytest.mark.nightly
def test_a_command_that_is_terminated_leaves_nothing_behind(tmp_path: Path) -> None:
    text = TRAIN.replace("    losses = []", "    print('training', flush=True)\n    import time; time.sleep(600)")
    (tmp_path / "temporary").mkdir()
    command = torchrun_command(*VERIFY, "--show-output", str(write_script(tmp_path, text)))
    environment = environment_of_user(TMPDIR=str(tmp_path / "temporary"))
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        assert any("training" in line for line in launcher.stderr)
        assert list((tmp_path / "temporary").glob("ddp_crossover-*"))
        launcher.terminate()
        launcher.communicate()
    assert not list((tmp_path / "temporary").glob("ddp_crossover-*"))


@pytest.mark.nightly
def test_in_place_it_is_said_that_the_script_writes(tmp_path: Path) -> None:
    text = TRAIN.replace("    losses = []", "    losses = []\n    open('log.txt', 'a').write('started')")
    done = torchrun(*VERIFY, "--in-place", "--show-output", str(write_script(tmp_path, text)), folder=tmp_path)
    assert done.returncode == 0 and (tmp_path / "log.txt").read_text() == "started" * 6
    assert done.stderr.count("The script's own writes happen for real") == 1
