"""`lease serve` and `lease status`."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_crossover.addons.lease import command
from ddp_crossover.addons.lease.protocol import Kind
from lease_processes import PACKAGE, LeaseProcesses
from sigint import default_sigint

SERVE = f"""
import argparse, sys
sys.path.append({PACKAGE!r})
from lease import command
parser = argparse.ArgumentParser()
command.add_arguments(parser)
sys.exit(command.run(parser.parse_args(sys.argv[1:])))
"""


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def test_status_shows_holder_and_waiters(
    processes: LeaseProcesses, lease_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = processes.broker()
    holder, waiter = processes.actor("holder"), processes.raw()
    holder.call("acquire")
    waiter.hello("waiter")
    waiter.send(Kind.REQUEST, request=1)
    assert waiter.hears_nothing()
    assert _run("status", "--json", "--directory", str(lease_directory)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["pid"] == broker.pid
    [resource] = answer["resources"]
    assert (resource["resource"], resource["holder"], resource["waiting"]) == ("cpu:0", "holder", ["waiter"])
    assert [(member["job"], member["holds"]) for member in resource["members"]] == [("holder", True), ("waiter", False)]
    assert _run("status", "--directory", str(lease_directory)) == 0
    assert "cpu:0: held by holder, waiter waiting" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["status", "top"])
@pytest.mark.parametrize("named", [".", "none"], ids=["empty directory", "no directory"])
def test_without_a_broker_it_says_so(
    verb: str, named: str, lease_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = lease_directory / named
    assert _run(verb, "--directory", str(directory)) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(f"lease {verb}: no broker serves {directory}: start a job that has a lease")
    assert shown.out == ""


def test_a_second_broker_is_refused(
    processes: LeaseProcesses, lease_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processes.broker()
    assert _run("serve", "--directory", str(lease_directory)) == 1
    assert "another broker" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_serves_until_it_is_told_to_end(
    processes: LeaseProcesses, lease_directory: Path, number: signal.Signals
) -> None:
    arguments = ["serve", "--directory", str(lease_directory)]
    command = [sys.executable, "-I", "-S", "-c", SERVE, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=default_sigint) as served:
        try:
            assert processes.actor("a").call("acquire")
            served.send_signal(number)
            assert served.wait(20) == 0
            assert not (lease_directory / "broker.sock").exists()
        finally:
            served.kill()
