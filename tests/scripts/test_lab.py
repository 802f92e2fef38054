"""The lab of several hosts on one machine: shaped links, torchrun's environment, and nothing left behind.

Everything is real: namespaces, `tc`, signals. So it needs root, and is skipped with the reason elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import Lab, LabError, why_no_lab
from lab_parts import namespaces
from sigint import default_sigint, ignored_sigint

LAB = Path(__file__).parents[2] / "scripts" / "lab.py"
REASON = why_no_lab() if sys.platform == "linux" else "needs Linux"
needs_lab = pytest.mark.skipif(REASON is not None, reason=str(REASON))
pytestmark = pytest.mark.timeout(240)

# Rank 1 sends megabytes to rank 0, which prints the seconds that they took.
TRANSFER = """
import os, socket, time
if os.environ["RANK"] == "0":
    server = socket.create_server(("", 5000))
    peer = server.accept()[0]
    start = time.perf_counter()
    while peer.recv(1 << 20):
        pass
    print(time.perf_counter() - start)
elif os.environ["RANK"] == "1":
    for _ in range(500):
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    peer.sendall(bytes({size_bytes}))
    peer.close()
"""
# Each rank other than 0 asks rank 0 for an answer a few times, and prints the shortest time that it took.
ROUND_TRIPS = """
import os, socket, time
rank, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0:
    server = socket.create_server(("", 5000))
    for _ in range(hosts - 1):
        peer = server.accept()[0]
        while message := peer.recv(1):
            peer.send(message)
else:
    for _ in range(500):
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    peer.send(b"x")
    peer.recv(1)  # rank 0 has taken the connection
    times_s = []
    for _ in range(5):
        start = time.perf_counter()
        peer.send(b"x")
        peer.recv(1)
        times_s.append(time.perf_counter() - start)
    print(min(times_s))
"""
SIZE_BYTES = 4 << 20
BURST_BYTES = 256 << 10
# Says that it is there, then outlives everything: ignores SIGTERM, and so does a child in a session of its own.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) < 2:
    subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
print("ready", flush=True)
time.sleep(1000)
"""


def own_namespaces(pid: int) -> list[str]:
    """Of the labs of one process: others may be at work on this machine."""
    return namespaces.existing(f"{namespaces.FAMILY}.{pid}.")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert own_namespaces(os.getpid()) == []


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def transfer_s(lab: Lab) -> float:
    return float(lab.run(python(TRANSFER.format(size_bytes=SIZE_BYTES)), timeout_s=60.0)[0].stdout)


def least_s(rate_bits_per_s: float) -> float:
    """What the shaped link needs at least: all but the burst goes at its rate."""
    return (SIZE_BYTES - BURST_BYTES) * 8 / rate_bits_per_s


@pytest.mark.alone
@needs_lab
@pytest.mark.parametrize("hosts", [2, 3])
def test_links_are_as_fast_as_asked_for(hosts: int) -> None:
    with Lab(hosts=hosts, rate="50mbit", burst="256kb") as lab:
        slow_s = transfer_s(lab)
        lab.reshape(rate="400mbit")
        faster_s = transfer_s(lab)
        lab.reshape(rate=None)
        free_s = transfer_s(lab)
    assert slow_s > least_s(50e6)
    assert faster_s > least_s(400e6)
    # Eight times as fast, and on an idle machine a hundred times; a busy one takes from both.
    assert slow_s / faster_s > 3
    assert slow_s / free_s > 6


@pytest.mark.alone
@needs_lab
def test_a_connection_is_as_fast_as_asked_for_on_a_faster_link() -> None:
    with Lab(rate="400mbit", per_connection="50mbit") as lab:
        alone_s = transfer_s(lab)
        lab.reshape(rate="200mbit")  # keeps the other limit
        again_s = transfer_s(lab)
    with Lab(rate="400mbit") as lab:
        free_s = transfer_s(lab)
    assert least_s(50e6) < alone_s < 2 * least_s(50e6)
    assert least_s(50e6) < again_s < 2 * least_s(50e6)
    assert free_s < alone_s / 2


@pytest.mark.alone
@needs_lab
def test_packets_arrive_as_late_as_asked_for() -> None:
    with Lab(hosts=3, rate="50mbit", delay_ms=20.0) as lab:
        relay = lab._relay
        assert relay is not None and relay.poll() is None
        trips_s = [float(result.stdout) for result in lab.run(python(ROUND_TRIPS), timeout_s=60.0)[1:]]
        slow_s = transfer_s(lab)
        lab.reshape(rate="400mbit")
        fast_s = transfer_s(lab)
    assert relay.poll() is not None  # it ends with the lab
    with Lab(hosts=3, rate="50mbit") as lab:
        near_s = [float(result.stdout) for result in lab.run(python(ROUND_TRIPS), timeout_s=60.0)[1:]]
    assert all(0.04 <= trip_s < 0.06 for trip_s in trips_s)
    assert max(near_s) < 0.01
    # Bandwidth stays as it was, less what TCP needs to get going.
    assert least_s(50e6) < slow_s < 2 * least_s(50e6)
    assert fast_s < slow_s / 1.5


@needs_lab
def test_the_environment_is_that_of_torchrun() -> None:
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python"]
    bare = {"PATH": os.environ["PATH"], "LC_CTYPE": "C.UTF-8"}
    given = json.loads(subprocess.run([*torchrun, *python(show)], env=bare, capture_output=True, check=True).stdout)
    # Only between torchrun's agent and its workers.
    expected = set(given) - set(bare) - {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}

    with Lab(hosts=3, rate=None) as lab:
        envs = [json.loads(result.stdout) for result in lab.run(python(show), env={"EXTRA": "1", "ROLE_NAME": "mine"})]
    for rank, env in enumerate(envs):
        assert expected - set(env) == set()
        assert (env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"]) == (str(rank), "0", str(rank))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("3", "1")
        assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "eth0"
        assert (env["EXTRA"], env["ROLE_NAME"]) == ("1", "mine")
    assert len({env["MASTER_ADDR"] for env in envs}) == 1


@needs_lab
def test_each_host_has_one_core_a_loopback_that_works_and_only_the_lab_network() -> None:
    show = """
import json, os, socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname())
print(json.dumps([list(os.sched_getaffinity(0)), [name for _, name in socket.if_nameindex()]]))
"""
    with Lab(hosts=2) as lab:
        seen = [json.loads(result.stdout) for result in lab.run(python(show), timeout_s=60.0)]
    cores = sorted(os.sched_getaffinity(0))
    assert [cpus for cpus, _ in seen] == [[cores[rank % len(cores)]] for rank in range(2)]
    assert all({"lo", "eth0"} <= set(names) and len(names) < 5 for _, names in seen)


@needs_lab
def test_connections_between_hosts_have_the_same_congestion_control_on_every_machine() -> None:
    show = "print(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())"
    code = TRANSFER.format(size_bytes=1).replace("    peer.sendall", f"    {show}\n    peer.sendall")
    code = code.replace("    start =", f"    {show}\n    start =")
    with Lab(hosts=2, rate=None) as lab:
        results = lab.run(python(code), timeout_s=60.0)
    assert [result.stdout.split()[0] for result in results] == ["cubic", "cubic"]


@needs_lab
def test_lines_come_while_hosts_run(tmp_path: Path) -> None:
    # Nobody goes on before both first lines have been seen: the callback removes what the hosts wait for.
    gate = tmp_path / "gate"
    gate.touch()
    wait = f"while os.path.exists({str(gate)!r}): time.sleep(0.01)"
    code = f"import os, sys, time\nprint('first', flush=True)\n{wait}\nprint('last', end='', file=sys.stderr)"
    lines = []

    def on_line(rank: int, stream: str, line: str) -> None:
        lines.append((rank, stream, line))
        if len(lines) == 2:
            gate.unlink()

    with Lab(hosts=2, rate=None) as lab:
        results = lab.run(python(code), on_line=on_line, timeout_s=60.0)
    assert sorted(lines[:2]) == [(0, "stdout", "first"), (1, "stdout", "first")]
    assert sorted(lines[2:]) == [(0, "stderr", "last"), (1, "stderr", "last")]
    assert [(r.rank, r.returncode, r.stdout, r.stderr) for r in results] == [(r, 0, "first\n", "last") for r in (0, 1)]


@needs_lab
def test_a_host_that_fails_ends_the_others_and_is_named() -> None:
    fail = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('no data')\ntime.sleep(1000)"
    with Lab(hosts=3, rate=None) as lab:
        with pytest.raises(LabError, match=r"(?s)host 1 ended with exit code 1; .*ValueError: no data") as error:
            lab.run(python(fail), timeout_s=100.0)
        assert error.value.failed_rank == 1
        assert [result.returncode for result in error.value.results] == [-signal.SIGTERM, 1, -signal.SIGTERM]
        assert namespaces.processes(own_namespaces(os.getpid())) == []
        # The lab is still good for another run.
        assert [result.returncode for result in lab.run(["true"])] == [0, 0, 0]


@needs_lab
def test_a_host_killed_by_a_signal_is_named() -> None:
    die = "import os, time\nif os.environ['RANK'] == '0': os.kill(os.getpid(), 9)\ntime.sleep(0.2)"
    with Lab(hosts=2, rate=None) as lab, pytest.raises(LabError, match="host 0 ended with signal SIGKILL"):
        lab.run(python(die))


@needs_lab
def test_time_runs_out() -> None:
    with Lab(hosts=2, rate=None) as lab:
        with pytest.raises(LabError, match=r"had not ended after 0.2 s") as error:
            lab.run(["sleep", "1000"], timeout_s=0.2)
        assert error.value.failed_rank is None
        assert namespaces.processes(own_namespaces(os.getpid())) == []


@needs_lab
def test_what_a_host_leaves_running_is_ended() -> None:
    leave = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    with Lab(hosts=2, rate=None) as lab:
        # The children hold the pipes open, which must not keep the run from ending.
        pids = [int(result.stdout) for result in lab.run(python(leave), timeout_s=60.0)]
    assert [namespaces.start_ticks(pid) for pid in pids] == [None, None]


@needs_lab
def test_an_exception_removes_the_lab() -> None:
    pids = []

    def on_line(rank: int, stream: str, line: str) -> None:
        pids.append(int(line))
        raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"), Lab(hosts=4) as lab:
        lab.run(["sh", "-c", "echo $$; sleep 1000"], on_line=on_line)
    assert own_namespaces(os.getpid()) == []
    assert pids and [pid for pid in pids if namespaces.start_ticks(pid)] == []


@needs_lab
def test_two_labs_live_side_by_side() -> None:
    with Lab(hosts=2, rate=None) as first:
        with Lab(hosts=2, rate=None) as second:
            transfer_s(second)
        transfer_s(first)


# Sends SIGINT at the entry of the n-th function that is called from the moment on when the lab is left: at every place
# where Python lets a handler run. Prints whether it came to that, and that the lab is gone.
INTERRUPT_AT_CALL = """
import signal, sys
sys.path.insert(0, {scripts!r})
from lab import Lab
from lab_parts import namespaces
lab, calls = Lab(hosts=2, rate=None), 0

def interrupt(frame, event, argument):
    global calls
    if event == "call":
        calls += 1
        if calls == int(sys.argv[1]):
            signal.raise_signal(signal.SIGINT)

try:
    with lab:
        sys.setprofile(interrupt)
except KeyboardInterrupt:
    pass
sys.setprofile(None)
print(calls >= int(sys.argv[1]), namespaces.existing(lab._prefix))
"""


def start_cli(*arguments: str, sigint: Callable[[], None] = default_sigint) -> subprocess.Popen[str]:
    """The command line in a session of its own, so that signals can reach its group as from a terminal."""
    command = [sys.executable, str(LAB), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=sigint
    )


def start_stubborn(tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A lab whose hosts and their children ignore SIGTERM, once all of them are there; and their pids."""
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    job = start_cli("--", sys.executable, "-S", str(script))
    assert job.stdout is not None
    for _ in range(4):
        assert "ready" in job.stdout.readline()
    pids = namespaces.processes(own_namespaces(job.pid))
    assert len(pids) == 4
    return job, pids


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_the_lab_and_is_the_exit_code(number: int) -> None:
    job = start_cli("--", "sh", "-c", "echo $$; sleep 1000")
    assert job.stdout is not None
    pids = [int(job.stdout.readline().split()[-1]) for _ in range(2)]
    os.killpg(job.pid, number)
    job.communicate(timeout=60)
    assert job.returncode == 128 + number
    assert own_namespaces(job.pid) == []
    assert [pid for pid in pids if namespaces.start_ticks(pid)] == []


@needs_lab
def test_in_the_background_it_works_and_ignores_a_ctrl_c(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = start_cli("--", "sh", "-c", f"echo ready; while ! test -e {gate}; do sleep 0.01; done", sigint=ignored_sigint)
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(2)]
    os.killpg(job.pid, signal.SIGINT)
    gate.touch()
    _, errors = job.communicate(timeout=60)
    assert (job.returncode, errors) == (0, "")
    assert own_namespaces(job.pid) == []


@needs_lab
def test_an_impatient_user_does_not_stop_the_cleaning_up(tmp_path: Path) -> None:
    job, pids = start_stubborn(tmp_path)
    while job.poll() is None and own_namespaces(job.pid):
        os.killpg(job.pid, signal.SIGINT)
        time.sleep(0.001)
    job.communicate(timeout=60)
    assert own_namespaces(job.pid) == []
    assert [pid for pid in pids if namespaces.start_ticks(pid)] == []


@needs_lab
@pytest.mark.parametrize("call", [1, 4, 32, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 3, 8, 128))])
def test_a_signal_at_any_call_of_the_cleaning_up_does_not_stop_it(call: int) -> None:
    code = INTERRUPT_AT_CALL.format(scripts=str(LAB.parent))
    command = [*python(code), str(call)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=default_sigint)
    assert (done.stdout, done.stderr) == ("True []\n", "")


@needs_lab
def test_what_a_killed_lab_left_is_removed_by_the_next(tmp_path: Path) -> None:
    job, pids = start_stubborn(tmp_path)
    job.kill()
    # Not waited for: an owner that is a zombie is dead, too.
    while namespaces.start_ticks(job.pid) is not None:
        time.sleep(0.01)
    assert len(own_namespaces(job.pid)) == 2
    assert all(namespaces.start_ticks(pid) for pid in pids)
    with Lab(hosts=2):
        assert own_namespaces(job.pid) == []
        assert [pid for pid in pids if namespaces.start_ticks(pid)] == []
    job.communicate(timeout=60)


@needs_lab
def test_a_pid_that_was_given_to_somebody_else_is_no_owner() -> None:
    name = f"{namespaces.FAMILY}.{os.getpid()}.1.abcdef.host0"
    namespaces.call("ip", "netns", "add", name)
    with Lab(hosts=2):
        assert not (namespaces.NETNS_DIR / name).exists()


@needs_lab
def test_the_command_line_shows_lines_and_gives_the_exit_code() -> None:
    job = start_cli("--hosts", "3", "--rate", "none", "--", "sh", "-c", "echo I am $RANK; test $RANK != 1 || exit 7")
    shown, errors = job.communicate(timeout=60)
    assert sorted(shown.splitlines()) == [f"[host {rank}] I am {rank}" for rank in range(3)]
    assert errors == "lab: host 1 ended with exit code 7\n"
    assert job.returncode == 7
    assert own_namespaces(job.pid) == []


@needs_lab
def test_the_command_line_gives_results_as_json() -> None:
    job = start_cli("--json", "--", "sh", "-c", "echo $RANK")
    shown, errors = job.communicate(timeout=60)
    assert [result["stdout"] for result in json.loads(shown)] == ["0\n", "1\n"]
    assert sorted(errors.splitlines()) == ["[host 0] 0", "[host 1] 1"]
    assert job.returncode == 0


@needs_lab
@pytest.mark.parametrize("settings", [("--rate", "fast"), ("--burst", "big"), ("--latency", "soon")])
def test_values_that_tc_does_not_know_are_named(settings: tuple[str, str]) -> None:
    job = start_cli(*settings, "--", "true")
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 2
    assert settings[1] in errors and "tc" in errors
    assert own_namespaces(job.pid) == []


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"hosts": 1}, "hosts must be 2 to 8, not 1"),
        ({"hosts": 9}, "hosts must be 2 to 8, not 9"),
        ({"delay_ms": -1.0}, "delay_ms must be 0 or more, not -1"),
    ],
)
def test_what_no_lab_can_be_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Lab(**given)


@pytest.mark.skipif(sys.platform != "linux", reason="other reasons come first elsewhere")
def test_without_the_tools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match=r"needs `ip`, which is not in PATH: install iproute2"), Lab():
        pass


@needs_lab
def test_without_the_rights_it_says_how_to_get_them() -> None:
    code = f"import sys; sys.path.insert(0, {str(LAB.parent)!r}); import lab; print(lab.why_no_lab())"
    bounded = ["setpriv", "--bounding-set", "-net_admin,-sys_admin", "--inh-caps", "-all"]
    said = subprocess.run([*bounded, *python(code)], capture_output=True, text=True, check=True).stdout
    assert "not permitted" in said and "run as root" in said
