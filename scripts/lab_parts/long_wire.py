"""A switch on long wires: hands on what hosts send, a fixed time later. Run by the lab as a process of its own.

    python long_wire.py HOSTS DELAY_MS

`tc netem` would do this, but many kernels lack it. Here each host's interface is a TUN device, whose other end is a
file that this process reads. It makes the devices in its own namespace, says so by a line, and ends with the
namespace. Packets are handed on as they come, up to 64 KiB at once and without checksums, so 1 Gb/s costs it a tenth of
a core. Source: Documentation/networking/tuntap.rst of Linux.
"""

import collections
import contextlib
import fcntl
import os
import select
import struct
import sys
import time

# linux/if_tun.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
# In front of each packet: a virtio_net_hdr, which says what is left to do, such as cutting it to the MTU.
HEADER_BYTES = 10
IPV4_DESTINATION = slice(HEADER_BYTES + 16, HEADER_BYTES + 20)
MAX_PACKET_BYTES = HEADER_BYTES + (1 << 16)


def interface(rank: int) -> str:
    """Name of a host's device before the lab moves it to the host."""
    return f"host{rank}"


def open_wire(name: str) -> int:
    """Make a TUN device; returns the file descriptor of its other end."""
    wire = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(wire, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return wire


def relay(wires: list[int], delay_s: float) -> None:
    """Hand each packet to the host that it is for, `delay_s` after it has come. Never returns."""
    # All wait equally long, so the first to come is the first to go.
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for wire in select.select(wires, [], [], wait_s)[0]:
            with contextlib.suppress(BlockingIOError):
                waiting.append((time.monotonic() + delay_s, os.read(wire, MAX_PACKET_BYTES)))
        while waiting and waiting[0][0] <= time.monotonic():
            packet = waiting.popleft()[1]
            rank = packet[IPV4_DESTINATION][-1] - 1
            # Anything but IPv4 to a host of the lab is lost, as are packets to a host that is being removed.
            if packet[HEADER_BYTES] >> 4 == 4 and 0 <= rank < len(wires):
                with contextlib.suppress(OSError):
                    os.write(wires[rank], packet)


def main(hosts: int, delay_s: float) -> None:
    """Make the devices, say so, and relay."""
    wires = [open_wire(interface(rank)) for rank in range(hosts)]
    print("ready", flush=True)
    with contextlib.suppress(PermissionError):
        # A network does not wait for the hosts' processors.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    relay(wires, delay_s)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]) / 1e3)
