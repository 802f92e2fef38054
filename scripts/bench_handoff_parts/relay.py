"""The bare relay: how long it takes to pass a turn on without any of the lease's logic.

`python relay.py FD TURNS HOLD_S` is one of its two ends.
"""

import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise

TURN = bytes(24)  # as long as a message of the lease
POLL_S = 10.0


def relays_us(turns: int, hold_s: float) -> list[float]:
    """Two processes take turns through a third one: microseconds from each send to its receive."""
    with ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        ends = []
        for _, end in pairs:
            command = [sys.executable, "-I", "-S", __file__, str(end.fileno()), str(turns), str(hold_s)]
            ends.append(subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[end.fileno()]))
            stack.callback(ends[-1].kill)
        epoll = select.epoll()
        towards = {pairs[i][0].fileno(): pairs[1 - i][0] for i in range(2)}
        for fd in towards:
            epoll.register(fd, select.EPOLLIN)
        pairs[0][0].send(TURN)
        for _ in range(2 * turns - 1):
            [(fd, _)] = epoll.poll(POLL_S)
            towards[fd].send(os.read(fd, 64))
        times = sorted(turn for end in ends for turn in json.loads(end.communicate()[0]))
    return [1e6 * (began_s - sent_s) for (_, sent_s), (began_s, _) in pairwise(times)]


def main() -> None:
    """Be an end: print when each turn began and ended."""
    turns, hold_s = int(sys.argv[2]), float(sys.argv[3])
    times = []
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        for _ in range(turns):
            sock.recv(64)
            began_s = time.monotonic()
            time.sleep(hold_s)
            times.append((began_s, time.monotonic()))
            sock.send(TURN)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
