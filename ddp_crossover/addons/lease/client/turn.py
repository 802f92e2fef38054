"""One process' turns on a resource, as negotiated with the broker."""

from __future__ import annotations

import time
from typing import NamedTuple

from ..protocol import Hello, Kind, ProtocolError, Role
from ..shared_memory import tag_of
from .connection import EARLY, BrokerConnection
from .reconnect import Reconnector

_UNKNOWN_FENCE = -1  # the fence of a hold whose grant has not been read yet


class _Hold(NamedTuple):
    """A hold, under ``fence`` of the broker at the other end of ``connection``.

    An early hold counts before the broker has granted it: another client has handed the resource over, and the broker
    learns of it some milliseconds later; or, with ``_UNKNOWN_FENCE``, a free resource was requested.
    """

    connection: BrokerConnection
    fence: int
    is_early: bool = False

    @property
    def is_granted(self) -> bool:
        """Whether the broker knows of this hold, as far as this process can see."""
        return not self.is_early or self.connection.page.fence == self.fence


class Turn:
    """The current turn of this process, if any. Callers hold the lease's lock to change it, not to read it.

    Attributes:
        grants: how often the resource was granted.
        lost: how often a hold ended without a release by this process.
        waited_s: seconds spent waiting for grants, including waits that ended without a grant.

    Args:
        reconnector: has the current connection to the broker.
        hello: this process' job, resource and role.
        max_wait_s: seconds to wait for other jobs.
    """

    def __init__(self, reconnector: Reconnector, hello: Hello, max_wait_s: float) -> None:
        self.grants = 0
        self.lost = 0
        self.waited_s = 0.0
        self._reconnector = reconnector
        self._is_filler = hello.role is Role.FILLER
        self._tag = tag_of(hello.job)
        self._max_wait_s = max_wait_s
        self._request = 0  # number of the last request
        self._hold: _Hold | None = None
        self._given: _Hold | None = None  # the last hold that this process has handed over; not one if its fence is 0

    # ---- reading

    @property
    def fence(self) -> int:
        """The fence of the current turn, even if the broker has ended it; 0 if none or not yet known."""
        hold = self._hold
        return max(hold.fence, 0) if hold is not None else 0

    @property
    def must_be_ended(self) -> bool:
        """Whether this process has a turn that it has not ended, even if the broker has."""
        return self._hold is not None

    @property
    def is_held(self) -> bool:
        """Whether there is a hold and the broker has not ended it."""
        hold = self._hold
        if hold is None or hold.connection is not self._reconnector.connection:
            return False
        page = hold.connection.page
        return page.holder in (0, self._tag) if hold.fence == _UNKNOWN_FENCE else page.admits(hold.fence)

    @property
    def is_undisturbed(self) -> bool:
        """Whether the hold is valid and no waiting job presses it."""
        hold = self._hold
        if hold is None or hold.connection is not self._reconnector.connection:
            return False
        return hold.connection.page.is_undisturbed(hold.fence)

    @property
    def is_asked_to_yield(self) -> bool:
        """Whether this filler holds the resource while a peer waits for it."""
        hold = self._hold
        return hold is not None and hold.connection.page.yielding == hold.fence

    @property
    def is_contended(self) -> bool:
        """Whether another job waits for the resource."""
        connection = self._reconnector.connection
        waiters = connection.page.waiters if connection is not None else 0
        return waiters > 0 and (waiters > 1 or not self._is_handed)

    @property
    def is_taken(self) -> bool:
        """Whether another job holds the resource."""
        connection = self._reconnector.connection
        if connection is None:
            return False
        if connection.page.holder not in (0, self._tag):
            return not self._is_handed
        given = self._given  # the broker may not have found the note yet
        return given is not None and given.connection is connection and 0 < given.fence == connection.page.promised

    @property
    def _is_handed(self) -> bool:
        """Whether the hold was handed over by another client, and the page shows this job as waiting still."""
        hold = self._hold
        return hold is not None and hold.fence > 0 and not hold.is_granted and self.is_held

    # ---- changing

    def request_if_free(self) -> bool:
        """Request a free resource without waiting for the grant; return whether that was possible."""
        connection = self._reconnector.connection
        if connection is None or self._is_filler:
            return False
        # While the resource is tied, the broker may keep it free for another job: its answer must be awaited.
        if connection.page.fence or connection.page.waiters or connection.page.tied:
            return False
        try:
            connection.discard_received()  # grants of earlier requests that were not waited for
            self._request += 1
            self._hold = _Hold(connection, _UNKNOWN_FENCE, is_early=True)
            connection.send(Kind.REQUEST, request=self._request)
        except OSError:
            self.forget()
            self._reconnector.disconnect(connection)
            return False
        self.grants += 1
        return True

    def request(self, kind: Kind) -> str | None:
        """Send REQUEST, or RELEASE that carries a new request, and wait for the grant.

        Returns None once granted, otherwise the reason why not.
        """
        held = self._count_if_lost()
        if self._hold is not None and not self._hold.is_granted:
            self._send_end(self._hold)  # cancels: RELEASE needs a fence that the broker knows
            held = None
        connection = self._reconnector.connection
        if connection is None:
            self.forget()
            return self._reconnector.why_disconnected
        start_s = time.monotonic()
        try:
            self.forget()
            self._request += 1
            beats = connection.page.beats
            fence = held.fence if held is not None else 0
            successor = connection.wake_successor(fence) if fence else 0
            connection.send(kind, request=self._request, fence=fence, successor=successor)
            why_not = self._wait_for_grant(connection, beats, start_s)
            self.grants += why_not is None
        except (OSError, ProtocolError) as error:
            self._reconnector.disconnect(connection)
            return f"lost the broker: {error}"
        except BaseException:
            # An interrupt, perhaps just after the grant arrived or before RELEASE was sent: cancel covers both.
            self.forget()
            self._send_cancel(connection)
            raise
        finally:
            self.waited_s += time.monotonic() - start_s
        return why_not

    def end(self) -> None:
        """Release the hold, or cancel the request whose grant has not been read yet."""
        held = self._count_if_lost()
        if self._hold is not None and not self._hold.is_granted:
            held = self._hold  # cancel even if it is lost: our turn must not come later
        if held is not None:
            self._send_end(held)
        # Forget last: after an interrupt in between, the hold can still be ended.
        self.forget()

    def forget(self) -> None:
        """Drop this process' record of its hold, without telling the broker."""
        self._hold = None

    # ---- internals

    def _wait_for_grant(self, connection: BrokerConnection, beats: int, start_s: float) -> str | None:
        """Return None once granted, otherwise the reason why not."""
        missed_beats = 0
        alone = connection.page.holder in (0, self._tag) and not connection.page.waiters
        while True:
            message = connection.receive(self._request, alone)
            if message is None:
                beats_now = connection.page.beats
                missed_beats = missed_beats + 1 if beats_now == beats else 0
                beats = beats_now
                if missed_beats == 2:
                    self._reconnector.disconnect(connection, slow=True)
                    return "the broker does not answer"
            elif message.kind is Kind.GRANT and message.request == self._request:
                if message.value == EARLY or connection.page.fence == message.fence:
                    self._hold = _Hold(connection, message.fence, is_early=message.value == EARLY)
                    return None
                # This process was stopped, and the broker has ended this hold since. Request again.
                self.lost += 1
                self._request += 1
                connection.send(Kind.REQUEST, request=self._request)
            if time.monotonic() - start_s > self._max_wait_s:
                self._send_cancel(connection)
                return f"waited for {self._max_wait_s} s"

    def _send_end(self, hold: _Hold) -> None:
        if not hold.is_granted:
            # A RELEASE might come before the broker knows of the hold, be stale, and leave this client in the queue.
            # CANCEL is right before and after that.
            self._send_cancel(hold.connection)
            return
        try:
            successor = hold.connection.hand_over(hold.fence)
            self._given = _Hold(hold.connection, successor)
            if not successor:
                hold.connection.send(Kind.RELEASE, fence=hold.fence)
        except OSError:
            self._reconnector.disconnect(hold.connection)

    def _send_cancel(self, connection: BrokerConnection) -> None:
        try:
            connection.send(Kind.CANCEL, request=self._request)
        except OSError:
            self._reconnector.disconnect(connection)

    def _count_if_lost(self) -> _Hold | None:
        """The hold if it is valid, else None; a hold that the broker has ended is counted as lost."""
        if self.is_held:
            return self._hold
        self.lost += self._hold is not None
        return None
