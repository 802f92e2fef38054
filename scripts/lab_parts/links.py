"""Hosts and the links between them, with `ip` and `tc` of iproute2.

Every interface is made inside of a namespace, so deleting the namespaces deletes all interfaces.
"""

import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from lab_parts import long_wire
from lab_parts.namespaces import call
from lab_parts.results import LabError

INTERFACE = "eth0"
# The same on every machine, and Linux's own default. With BBR, which some kernels prefer, a connection that has been
# used without a pause for 10 s, or comes back after such a time, sends next to nothing for 100 to 200 ms. Arms of a
# bench that take turns would each pay for that in every turn.
CONGESTION_CONTROL = "cubic"


# A connection's class is told by some bits of its two ports; the lowest ones are alike where Linux chooses ports.
_PORT_BITS = 0x1E


class Shaping(NamedTuple):
    """How fast a host may send, as `tc` writes it: tc-tbf(8). A rate of None means no limit.

    `per_connection` limits each TCP connection beside that, as clouds do: tc-htb(8), with a class for each of 256 pairs
    of port numbers.
    """

    rate: str | None
    burst: str
    latency: str
    per_connection: str | None = None


def address(rank: int) -> str:
    """IPv4 address of a host. Private to its lab, like everything in it."""
    return f"10.0.0.{rank + 1}"


def connect(hosts: Sequence[str], switch: str, delay_ms: float | None) -> subprocess.Popen[bytes] | None:
    """Make the namespaces `hosts`: two joined by a cable, more by a bridge in the namespace `switch`.

    With a delay, wires go to a process in that namespace, which hands packets on that much later. Returns it;
    it ends with its namespace.
    """
    for host in hosts:
        call("ip", "netns", "add", host)
    relay = None
    if delay_ms is not None:
        call("ip", "netns", "add", switch)
        relay = lay_long_wires(hosts, switch, delay_ms)
    elif len(hosts) == 2:
        add_cable(hosts[0], INTERFACE, hosts[1], INTERFACE)
    else:
        call("ip", "netns", "add", switch)
        add_bridge(switch)
        for rank, host in enumerate(hosts):
            port = f"port{rank}"
            add_cable(host, INTERFACE, switch, port)
            call("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
    for rank, host in enumerate(hosts):
        call("ip", "-n", host, "addr", "add", f"{address(rank)}/24", "dev", INTERFACE)
        call("ip", "-n", host, "link", "set", INTERFACE, "up")
        local = ("10.0.0.0/24", "dev", INTERFACE, "proto", "kernel", "scope", "link", "src", address(rank))
        call("ip", "-n", host, "route", "replace", *local, "congctl", "lock", CONGESTION_CONTROL)
        call("ip", "-n", host, "link", "set", "lo", "up")
    return relay


def lay_long_wires(hosts: Sequence[str], switch: str, delay_ms: float) -> subprocess.Popen[bytes]:
    """Start the process that relays packets, and give each host its end of a wire."""
    command = ["ip", "netns", "exec", switch, sys.executable, "-S", long_wire.__file__, str(len(hosts)), str(delay_ms)]
    # A Ctrl-C is for the lab, which removes the namespace.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        if not process.stdout.readline():
            said = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            raise LabError(f"no long wires: {' '.join(said)}")
    for rank, host in enumerate(hosts):
        call("ip", "-n", switch, "link", "set", long_wire.interface(rank), "netns", host, "name", INTERFACE)
    return process


def add_cable(host: str, name: str, peer_host: str, peer_name: str) -> None:
    """A veth pair from one namespace to another."""
    peer = ("peer", "name", peer_name, "netns", peer_host)
    call("ip", "-n", host, "link", "add", name, "type", "veth", *peer)


def add_bridge(host: str) -> None:
    """A bridge without ports, which is up."""
    call("ip", "-n", host, "link", "add", "br0", "type", "bridge")
    call("ip", "-n", host, "link", "set", "br0", "up")


def shape(host: str, shaping: Shaping) -> None:
    """Limit what a host sends; replaces an earlier limit. Packets in the queue are kept."""
    if shaping.per_connection is not None:
        _shape_connections(host, shaping)
        return
    if shaping.rate is None:
        discipline: tuple[str, ...] = ("noqueue",)
    else:
        discipline = ("tbf", "rate", shaping.rate, "burst", shaping.burst, "latency", shaping.latency)
    call("tc", "-n", host, "qdisc", "replace", "dev", INTERFACE, "root", *discipline)


def _shape_connections(host: str, shaping: Shaping) -> None:
    burst = f"burst {shaping.burst} cburst {shaping.burst}"
    lines = [
        "qdisc replace dev {0} root noqueue",  # with what an earlier limit has left
        "qdisc replace dev {0} root handle 1: htb default 10",
        f"class add dev {{0}} parent 1: classid 1:1 htb rate {shaping.rate} {burst}",
    ]
    # A class's own rate is granted even if that of all together is used up; beyond it they borrow from each other.
    for number, (source, target) in enumerate(product(range(0, _PORT_BITS + 1, 2), repeat=2), 0x10):
        class_ = f"1:{number:x}"
        ports = f"match u16 {source:#x} {_PORT_BITS:#x} at 20 match u16 {target:#x} {_PORT_BITS:#x} at 22"
        lines += [
            f"class add dev {{0}} parent 1:1 classid {class_} htb rate 1mbit ceil {shaping.per_connection} {burst}",
            f"filter add dev {{0}} parent 1: protocol ip prio 1 u32 {ports} flowid {class_}",
        ]
    call("tc", "-n", host, "-batch", "-", given="\n".join(lines).format(INTERFACE) + "\n")
