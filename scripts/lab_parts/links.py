"""Hosts and the links between them, with `ip` and `tc` of iproute2.

Every interface is made inside of a namespace, so deleting the namespaces deletes all interfaces.
"""

from collections.abc import Sequence
from typing import NamedTuple

from lab_parts.namespaces import call

INTERFACE = "eth0"
# The same on every machine, and Linux's own default. With BBR, which some kernels prefer, a connection that has been
# used without a pause for 10 s, or comes back after such a time, sends next to nothing for 100 to 200 ms. Arms of a
# bench that take turns would each pay for that in every turn.
CONGESTION_CONTROL = "cubic"


class Shaping(NamedTuple):
    """How fast a host may send, as `tc` writes it: tc-tbf(8). A rate of None means no limit."""

    rate: str | None
    burst: str
    latency: str


def address(rank: int) -> str:
    """IPv4 address of a host. Private to its lab, like everything in it."""
    return f"10.0.0.{rank + 1}"


def connect(hosts: Sequence[str], switch: str) -> None:
    """Make the namespaces `hosts`: two joined by a cable, more by a bridge in the namespace `switch`."""
    for host in hosts:
        call("ip", "netns", "add", host)
    if len(hosts) == 2:
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
    if shaping.rate is None:
        discipline: tuple[str, ...] = ("noqueue",)
    else:
        discipline = ("tbf", "rate", shaping.rate, "burst", shaping.burst, "latency", shaping.latency)
    call("tc", "-n", host, "qdisc", "replace", "dev", INTERFACE, "root", *discipline)
