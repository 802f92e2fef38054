"""A client process: makes one lease and does what it is told, a JSON line at a time.

Started without torch, as `python -I -S lease_actor.py <directory of ddp_crossover> <options>`, so that a test can
have many.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

sys.path.append(sys.argv[1])

from lease.client import GpuLease


def snapshot(lease: GpuLease) -> dict[str, Any]:
    return {"acquired": lease.acquire(), "holding": lease.holding, "fence": lease.fence, "contended": lease.contended}


class Actor:
    def __init__(self, options: dict[str, Any]) -> None:
        self.lease = GpuLease(**options)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def stats(self) -> dict[str, Any]:
        return self.lease.stats().__dict__

    def get(self, name: str) -> Any:
        return getattr(self.lease, name)

    def acquire(self) -> bool:
        return self.lease.acquire()

    def release(self) -> None:
        self.lease.release()

    def yield_turn(self) -> bool:
        return self.lease.yield_turn()

    def release_with_signal(self, number: int) -> bool:
        """Get this signal just after having woken the next client. Whether it was woken."""
        connection = self.lease._reconnector.connection
        hand_over, woken = connection.hand_over, []

        def hand_over_and_signal(*arguments: Any, **options: Any) -> bool:
            woken.append(hand_over(*arguments, **options))
            os.kill(os.getpid(), number)
            return woken[0]

        connection.hand_over = hand_over_and_signal
        try:
            self.lease.release()
        finally:
            del connection.hand_over
        return bool(woken and woken[0])

    def write_note(self, ahead: int, successor: int, at_s: float) -> None:
        """Say that the current hold, or one that many ahead, was handed over."""
        note = self.lease._reconnector.connection._note
        note.write(self.lease.fence + ahead, successor, int(1e9 * at_s))

    def ring(self, member: int, fence: int) -> bool:
        """Wake a client without having anything to hand over. Whether it could be woken."""
        connection = self.lease._reconnector.connection
        connection.discard_received()  # the introduction is among it
        return connection._neighbours.wake(member, fence)

    def close(self) -> None:
        self.lease.close()

    def wait_until_connected(self, timeout_s: float) -> bool:
        return self.lease.wait_until_connected(timeout_s)

    def hold_for(self, seconds: float) -> dict[str, Any]:
        """Acquire and release; when it held, by the clock that all processes of the host share."""
        with self.lease.held() as leased:
            start = time.monotonic()
            fence = self.lease.fence
            time.sleep(seconds)
            return {"leased": leased, "fence": fence, "start": start, "end": time.monotonic()}

    def take_turns(self, seconds: float, hold_s: float, gap_s: float) -> list[dict[str, Any]]:
        """Hold and pause by turns for some time; the holds."""
        until = time.monotonic() + seconds
        holds = []
        while time.monotonic() < until:
            holds.append(self.hold_for(hold_s))
            time.sleep(gap_s)
        return holds

    def fork(self) -> dict[str, Any]:
        """Fork a child that lives on; its pid and what it sees of the lease."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # whatever becomes of the test, or of this child
            before = time.monotonic()
            seen = snapshot(self.lease)
            self.lease.release()
            seen["seconds"] = time.monotonic() - before
            seen["sockets"] = sum(is_socket(fd) for fd in range(3, 64))
            os.write(write, json.dumps(seen).encode())
            sys.stdin.close()
            os.closerange(0, 3)
            signal.pause()
            os._exit(0)
        os.close(write)
        return {"pid": pid, "seen": json.loads(os.read(read, 4096))}

    def fork_with_open_socket(self) -> dict[str, Any]:
        """Fork a child that keeps the connection open, as one that was forked behind Python's back would."""
        duplicate = os.dup(self.lease._reconnector.connection._sock.fileno())
        answer = self.fork()
        os.close(duplicate)
        return answer

    def fork_while_a_thread_waits(self) -> dict[str, Any]:
        threading.Thread(target=self.lease.acquire, daemon=True).start()
        while not self.lease.contended:
            time.sleep(0.001)
        return self.fork()

    def raise_while_holding(self) -> bool | None:
        try:
            with self.lease.held():
                bytearray(1 << 60)
        except MemoryError:
            return self.lease.holding
        return None

    def interrupt_while_holding(self) -> bool | None:
        try:
            with self.lease.held():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
        except KeyboardInterrupt:
            return self.lease.holding
        return None

    def interrupt_while_waiting(self, after_s: float) -> bool | str:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, after_s)
        try:
            with self.lease.held():
                return "not interrupted"
        except KeyboardInterrupt:
            return self.lease.holding

    def interrupt_at_every_point(self, times: int, step_s: float) -> int:
        """Interrupt acquire and release at many moments."""
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        interrupts = 0
        for index in range(times):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, step_s * (index + 1))
                    with self.lease.held():
                        pass
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
        return interrupts

    def sockets_of_a_new_program(self) -> int:
        """How many of our sockets a program sees that was started without care for what it inherits."""
        count = "import os; print(sum('socket' in os.readlink(f'/proc/self/fd/{f}') for f in range(3, 64)"
        count += " if os.path.islink(f'/proc/self/fd/{f}')))"
        return int(subprocess.check_output([sys.executable, "-I", "-S", "-c", count], close_fds=False))

    def exit(self) -> NoReturn:
        """Leave as a script does that has come to its end."""
        sys.exit(0)


def is_socket(fd: int) -> bool:
    try:
        return socket.socket(fileno=os.dup(fd)).type == socket.SOCK_SEQPACKET
    except OSError:
        return False


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    actor = Actor(json.loads(sys.argv[2]))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        result = getattr(actor, name)(*arguments)
        print(json.dumps({"result": result}), flush=True)


main()
