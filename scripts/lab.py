"""Several hosts on one machine: network namespaces, shaped links, one core each.

    sudo ddp-crossover lab --hosts 2 --rate 1gbit -- python train.py
    sudo ddp-crossover lab --hosts 4 --rate 500mbit --json -- python -c 'print("hello")'

Builds the hosts, runs the command on each as torchrun would (RANK, WORLD_SIZE, MASTER_ADDR, ...),
shows its output with the host in front, and removes everything. The exit code is that of the first host
that failed, 124 after a timeout, 2 if the lab cannot be built.
Two hosts share a virtual cable; more hang on a bridge. Each host's sending is shaped with tc tbf; --delay-ms makes
wires long.
From Python:

    with Lab(hosts=2, rate="1gbit") as lab:
        results = lab.run([sys.executable, "train.py"])
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from lab_parts import links, namespaces
from lab_parts.commands import OnLine, Run
from lab_parts.links import Shaping
from lab_parts.results import HostResult, LabError
from lab_parts.signals import ending_signals_raise, uninterrupted
from lab_parts.torchrun import worker_variables

__all__ = ["HostResult", "Lab", "LabError", "why_no_lab"]

MAX_HOSTS = 8
# Namespaces have ports of their own, so a fixed one is always free.
MASTER_PORT = 29500
TIMEOUT_EXIT_CODE = 124  # as of timeout(1)
REFUSED_EXIT_CODE = 2


def why_no_lab() -> str | None:
    """The reason why this process cannot build a lab, with the way out; None if it can.

    Builds and removes a namespace with all that a lab needs, in about 30 ms.
    """
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(tool) is None:
            return f"the lab needs `{tool}`, which is not in PATH: install {package} (and have /usr/sbin in PATH)"
    host = namespaces.new_prefix() + "probe"
    rights = "run as root (sudo); in a container, start that with --privileged"
    module = "the kernel may lack the module {0}: try `modprobe {0}` outside of containers"
    trials: tuple[tuple[Callable[[], None], str], ...] = (
        (lambda: namespaces.call("ip", "netns", "add", host), rights),
        (lambda: links.add_cable(host, links.INTERFACE, host, "peer0"), module.format("veth")),
        (lambda: links.add_bridge(host), module.format("bridge")),
        (lambda: links.shape(host, Shaping("1gbit", "256kb", "20ms")), module.format("sch_tbf")),
        (lambda: namespaces.call("ip", "netns", "exec", host, "true"), rights),
    )
    with ending_signals_raise():
        try:
            for attempt, way_out in trials:
                try:
                    attempt()
                except LabError as error:
                    return f"the lab cannot be built here: {error}; {way_out}"
        finally:
            namespaces.remove_all(host)
    return None


class Lab:
    """`hosts` (2 to 8) hosts, joined by links on which each sends at `rate`; None leaves them unshaped.

    `rate`, `burst` and `latency` are written as for `tc` (tc-tbf(8)): "1gbit", "256kb", "20ms". With `slow_nic`, that
    is the rate of the last host. With `delay_ms` each packet arrives that much later, so that a round trip takes twice
    as long. With `per_connection`, no TCP connection sends faster than that. Each host is pinned to one of the cores
    that this process may use, in turn. While the lab is open, SIGTERM and SIGHUP raise SystemExit unless they had a
    handler, so that it is removed. After SIGKILL the next lab on this machine removes it.

    Raises ValueError for a wrong number of hosts or a negative delay; entering it raises LabError with the way out when
    it cannot be built.
    """

    def __init__(
        self,
        hosts: int = 2,
        *,
        rate: str | None = "1gbit",
        burst: str = "256kb",
        latency: str = "20ms",
        slow_nic: str | None = None,
        delay_ms: float | None = None,
        per_connection: str | None = None,
    ) -> None:
        if not 2 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be 2 to {MAX_HOSTS}, not {hosts}")
        if delay_ms is not None and not delay_ms >= 0:
            raise ValueError(f"delay_ms must be 0 or more, not {delay_ms:g}")
        self.hosts = hosts
        if per_connection is not None and rate is None:
            raise ValueError("per_connection limits a part of rate: give rate as well")
        self._shaping = Shaping(rate, burst, latency, per_connection)
        self._slow_nic = slow_nic
        self._delay_ms = delay_ms
        self._relay: subprocess.Popen[bytes] | None = None
        self._prefix = namespaces.new_prefix()
        self._namespaces = [f"{self._prefix}host{rank}" for rank in range(hosts)]
        self._signals = contextlib.ExitStack()

    def __enter__(self) -> "Lab":
        try:
            self._signals.enter_context(ending_signals_raise())
            if reason := why_no_lab():
                raise LabError(reason)
            namespaces.remove(namespaces.leftovers())
            self._relay = links.connect(self._namespaces, f"{self._prefix}switch", self._delay_ms)
            self._shape()
        except BaseException:
            self._close()
            raise
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    @uninterrupted
    def _close(self) -> None:
        with self._signals:
            namespaces.remove_all(self._prefix)
            if self._relay is not None:
                self._relay.wait()

    def reshape(self, rate: str | None) -> None:
        """Change the rate of every host, also while they run (from `on_line` or another thread); None: no limit.

        Raises LabError when `tc` refuses the value.
        """
        self._shaping = self._shaping._replace(rate=rate)
        self._shape()

    def _shape(self) -> None:
        for host in self._namespaces:
            is_slow = self._slow_nic is not None and host == self._namespaces[-1]
            links.shape(host, self._shaping._replace(rate=self._slow_nic) if is_slow else self._shaping)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        on_line: OnLine | None = None,
    ) -> list[HostResult]:
        """Run a command on every host at once; results in the order of ranks.

        `env` adds to this process's environment and torchrun's variables, and wins over both.
        `on_line(rank, "stdout" or "stderr", line)` is called as lines come, on the calling thread.
        Processes that a command leaves behind are ended with it. Raises LabError with the end of the output
        of the first host that failed (the others are ended soon after), or when `timeout_s` is over.
        """
        run = Run(on_line)
        try:
            cores = sorted(os.sched_getaffinity(0))
            for rank, host in enumerate(self._namespaces):
                pinned = ["taskset", "-c", str(cores[rank % len(cores)]), *command]
                inside = ["ip", "netns", "exec", host, *pinned]
                run.start(rank, inside, {**os.environ, **self._environment(rank), **(env or {})})
            ended = run.follow_to_the_end(timeout_s)
        finally:
            run.end(lambda: namespaces.kill_processes(self._namespaces))
        results = [host.result() for host in run.hosts]
        if not ended:
            raise LabError(f"the hosts had not ended after {timeout_s:g} s", results)
        if run.failed is not None:
            raise LabError(f"host {run.failed.result().how_it_failed()}", results, run.failed.rank)
        return results

    def _environment(self, rank: int) -> dict[str, str]:
        """The variables that torchrun gives a worker, and the interface to the other hosts."""
        run_id = self._prefix.rstrip(".")
        master = links.address(0), MASTER_PORT
        return worker_variables(rank, self.hosts, 1, master, run_id, agent_has_store=False) | {
            "GLOO_SOCKET_IFNAME": links.INTERFACE,
            "NCCL_SOCKET_IFNAME": links.INTERFACE,
            # NCCL takes ranks with equal ids for one machine and would go through its memory.
            "NCCL_HOSTID": self._namespaces[rank],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the lab, run the command, show its output; returns the exit code of the first host that failed."""
    args = _parse_args(arguments)

    def show(rank: int, stream: str, line: str) -> None:
        to = sys.stdout if stream == "stdout" and not args.json else sys.stderr
        print(f"[host {rank}] {line}", file=to, flush=True)

    try:
        with Lab(
            args.hosts,
            rate=args.rate,
            burst=args.burst,
            latency=args.latency,
            delay_ms=args.delay_ms,
            per_connection=args.per_connection,
        ) as lab:
            results, exit_code = lab.run(args.command, timeout_s=args.timeout_s, on_line=show), 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except LabError as error:
        # The rest of a host's failure has been shown as it came.
        print(f"lab: {str(error).splitlines()[0].removesuffix('; its last output:')}", file=sys.stderr)
        results, exit_code = error.results, _exit_code(error)
    if args.json:
        print(json.dumps([result._asdict() for result in results], indent=2))
    return exit_code


def _exit_code(error: LabError) -> int:
    if error.failed_rank is None:
        return TIMEOUT_EXIT_CODE if error.results else REFUSED_EXIT_CODE
    returncode = error.results[error.failed_rank].returncode
    # As a shell reports a signal.
    return returncode if returncode > 0 else 128 - returncode


def _parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ddp-crossover lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, choices=range(2, MAX_HOSTS + 1), default=2, help="number of hosts (2)")
    parser.add_argument("--rate", default="1gbit", help="each host sends at most this fast; 'none': no limit (1gbit)")
    parser.add_argument("--burst", default="256kb", help="sent at once after a pause, see tc-tbf(8) (256kb)")
    parser.add_argument("--latency", default="20ms", help="longest wait in the queue before packets drop (20ms)")
    parser.add_argument(
        "--delay-ms", type=_delay_ms, metavar="MS", help="each packet arrives this much later (no delay)"
    )
    parser.add_argument("--per-connection", metavar="RATE", help="each TCP connection sends at most this fast")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="time limit for all hosts (600)")
    parser.add_argument("--json", action="store_true", help="results as JSON on stdout; the hosts' lines go to stderr")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what every host runs")
    args = parser.parse_args(arguments)
    args.command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not args.command:
        parser.error("give the command that every host runs after --")
    if args.per_connection and args.rate == "none":
        parser.error("--per-connection limits a part of --rate: give a rate")
    args.rate = None if args.rate == "none" else args.rate
    return args


def _delay_ms(text: str) -> float:
    if not 0 <= (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give 0 or more milliseconds")
    return number


if __name__ == "__main__":
    sys.exit(main())
