"""One process' turns on a resource, as negotiated with the broker."""

from __future__ import annotations

import time

from ..protocol import Hello, Kind, ProtocolError, Role
from ..state_page import tag_of
from .connection import BrokerConnection
from .reconnect import Reconnector

_NOT_KNOWN_YET = -1  # fence of a hold that was requested without waiting for the grant


class Turn:
    """The current turn of this process, if any. Callers hold the lease's lock to change it, not to read it.

    Attributes:
        grants: how often the resource was granted.
        lost: how often a hold ended without a release by this process.
        waited_s: seconds spent waiting for grants, including waits that ended without a grant.

    Args:
        reconnector: keeps the connection to the broker.
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
        self._request = 0
        self._fence = 0
        self._held_on: BrokerConnection | None = None

    # ---- reading

    @property
    def fence(self) -> int:
        """The fence of the current turn, even if the broker has ended it; 0 if none or not yet known."""
        return max(self._fence, 0)

    @property
    def is_asked_for(self) -> bool:
        """Whether there is a request or a hold to end, even if the broker has already ended it."""
        return self._fence != 0

    @property
    def is_held(self) -> bool:
        """Whether there is a hold and the broker has not ended it."""
        held_on = self._held_on
        if held_on is None or held_on is not self._reconnector.connection:
            return False
        if self._fence == _NOT_KNOWN_YET:
            return held_on.page.holder in (0, self._tag)
        return held_on.page.fence == self._fence

    @property
    def is_undisturbed(self) -> bool:
        """Whether the hold is valid and no waiting job presses it."""
        held_on = self._held_on
        return (
            held_on is not None and held_on is self._reconnector.connection and held_on.page.is_undisturbed(self._fence)
        )

    @property
    def is_asked_to_yield(self) -> bool:
        """Whether this filler holds the resource while a peer waits for it."""
        held_on = self._held_on
        return held_on is not None and held_on.page.yielding == self._fence != 0

    @property
    def is_taken(self) -> bool:
        """Whether another job holds the resource."""
        connection = self._reconnector.connection
        return connection is not None and connection.page.holder not in (0, self._tag)

    # ---- changing

    def ask_if_free(self) -> bool:
        """Request a free resource without waiting for the grant; return whether that was possible."""
        connection = self._reconnector.connection
        if connection is None or self._is_filler:
            return False
        # While the resource is tied, the broker may keep it free for another job: its answer must be awaited.
        if connection.page.fence or connection.page.waiters or connection.page.tied:
            return False
        try:
            connection.discard()  # grants of earlier requests that were not waited for
            self._request += 1
            self._held_on, self._fence = connection, _NOT_KNOWN_YET
            connection.send(Kind.REQUEST, request=self._request)
        except OSError:
            self.forget()
            self._reconnector.give_up(connection)
            return False
        self.grants += 1
        return True

    def ask(self, kind: Kind) -> str | None:
        """Send REQUEST, or RELEASE that carries a new request, and wait for the grant.

        Returns None once granted, otherwise the reason why not.
        """
        held_on = self._checked_hold()
        if self._fence == _NOT_KNOWN_YET and self._held_on is not None:
            self._send_end(self._held_on)  # cancels: RELEASE needs a fence, which is not yet known
            held_on = None
        fence = self._fence if held_on is not None else 0
        connection = self._reconnector.connection
        if connection is None:
            self.forget()
            return self._reconnector.why_none
        start_s = time.monotonic()
        try:
            self.forget()
            self._request += 1
            beats = connection.page.beats
            connection.send(kind, request=self._request, fence=fence)
            outcome = self._await_grant(connection, beats, start_s)
            self.grants += outcome is None
        except (OSError, ProtocolError) as error:
            self._reconnector.give_up(connection)
            return f"lost the broker: {error}"
        except BaseException:
            # An interrupt, perhaps just after the grant arrived or before RELEASE was sent: cancel covers both.
            self.forget()
            self._send_cancel(connection)
            raise
        finally:
            self.waited_s += time.monotonic() - start_s
        return outcome

    def end(self) -> None:
        """Release the hold, or cancel the request."""
        held_on = self._checked_hold()
        if self._fence == _NOT_KNOWN_YET:
            held_on = self._held_on  # cancel even if another job came first: our turn must not come later
        if held_on is not None:
            self._send_end(held_on)
        # Forget last: after an interrupt in between, the hold can still be ended.
        self.forget()

    def forget(self) -> None:
        """Drop this process' record of its hold or request, without telling the broker."""
        self._held_on, self._fence = None, 0

    # ---- internals

    def _await_grant(self, connection: BrokerConnection, beats: int, start_s: float) -> str | None:
        """Return None once granted, otherwise the reason why not."""
        missed_beats = 0
        while True:
            message = connection.receive()
            if message is None:
                beats_now = connection.page.beats
                missed_beats = missed_beats + 1 if beats_now == beats else 0
                beats = beats_now
                if missed_beats == 2:
                    self._reconnector.give_up(connection, slow=True)
                    return "the broker does not answer"
            elif message.kind is Kind.GRANT and message.request == self._request:
                if connection.page.fence == message.fence:
                    self._fence, self._held_on = message.fence, connection
                    return None
                # This process was stopped, and the broker has ended this hold since. Request again.
                self.lost += 1
                self._request += 1
                connection.send(Kind.REQUEST, request=self._request)
            if time.monotonic() - start_s > self._max_wait_s:
                self._send_cancel(connection)
                return f"waited for {self._max_wait_s} s"

    def _send_end(self, connection: BrokerConnection) -> None:
        if self._fence == _NOT_KNOWN_YET:
            self._send_cancel(connection)
            return
        try:
            connection.send(Kind.RELEASE, fence=self._fence)
        except OSError:
            self._reconnector.give_up(connection)

    def _send_cancel(self, connection: BrokerConnection) -> None:
        try:
            connection.send(Kind.CANCEL, request=self._request)
        except OSError:
            self._reconnector.give_up(connection)

    def _checked_hold(self) -> BrokerConnection | None:
        """The connection of a valid hold, else None; counts a hold that the broker has ended."""
        if self.is_held:
            return self._held_on
        self.lost += self._fence != 0
        return None
