"""One process' turns on a resource, as it agrees on them with the broker."""

from __future__ import annotations

import time

from .connection import BrokerConnection
from .keeper import Keeper
from .page import tag_of
from .protocol import Hello, Kind, ProtocolError, Role

_NOT_KNOWN_YET = -1  # the fence of a hold that was asked for and not waited for


class Turn:
    """The turn that is on, if any. Whoever changes it holds the lease's lock; to look takes none.

    Attributes:
        grants: how often the resource was granted.
        lost: how often the broker ended a hold.
        waited_s: time spent waiting for grants, also in vain.

    Args:
        keeper: of the connection.
        hello: who asks.
        max_wait_s: how long to wait for other jobs.
    """

    def __init__(self, keeper: Keeper, hello: Hello, max_wait_s: float) -> None:
        self.grants = 0
        self.lost = 0
        self.waited_s = 0.0
        self._keeper = keeper
        self._is_filler = hello.role is Role.FILLER
        self._tag = tag_of(hello.job)
        self._max_wait_s = max_wait_s
        self._request = 0
        self._fence = 0
        self._held_on: BrokerConnection | None = None

    # ---- looking

    @property
    def fence(self) -> int:
        """The number of the turn that was on last; 0 if none, or not known yet."""
        return max(self._fence, 0)

    @property
    def is_asked_for(self) -> bool:
        """Whether there is something to end, be it held or not."""
        return self._fence != 0

    @property
    def is_held(self) -> bool:
        """Whether the hold is valid. The broker may have ended it meanwhile."""
        held_on = self._held_on
        if held_on is None or held_on is not self._keeper.connection:
            return False
        if self._fence == _NOT_KNOWN_YET:
            return held_on.page.holder in (0, self._tag)
        return held_on.page.fence == self._fence

    @property
    def is_undisturbed(self) -> bool:
        """Whether it is held, and nobody presses."""
        held_on = self._held_on
        return held_on is not None and held_on is self._keeper.connection and held_on.page.is_calm(self._fence)

    @property
    def is_asked_to_yield(self) -> bool:
        """Whether a peer waits for what this filler holds."""
        held_on = self._held_on
        return held_on is not None and held_on.page.yielding == self._fence != 0

    @property
    def is_taken(self) -> bool:
        """Whether another job holds the resource."""
        connection = self._keeper.connection
        return connection is not None and connection.page.holder not in (0, self._tag)

    # ---- changing

    def ask_if_free(self) -> bool:
        """Ask where nobody is in the way, and do not wait for the answer."""
        connection = self._keeper.connection
        if connection is None or self._is_filler:
            return False
        # Where it may be kept free for another job, the answer counts.
        if connection.page.fence or connection.page.waiters or connection.page.tied:
            return False
        try:
            connection.discard()  # earlier answers that nobody has waited for
            self._request += 1
            self._held_on, self._fence = connection, _NOT_KNOWN_YET
            connection.send(Kind.REQUEST, request=self._request)
        except OSError:
            self.forget()
            self._keeper.give_up(connection)
            return False
        self.grants += 1
        return True

    def ask(self, kind: Kind) -> str | None:
        """Send REQUEST, or RELEASE with a request in it, and wait for the grant.

        Returns why there is none; None with the grant in hand.
        """
        held_on = self._checked_hold()
        if self._fence == _NOT_KNOWN_YET and self._held_on is not None:
            self._send_end(self._held_on)  # there is no fence yet to be sent along
            held_on = None
        fence = self._fence if held_on is not None else 0
        connection = self._keeper.connection
        if connection is None:
            self.forget()
            return self._keeper.why_none
        start_s = time.monotonic()
        try:
            self.forget()
            self._request += 1
            beats = connection.page.beats
            connection.send(kind, request=self._request, fence=fence)
            outcome = self._await_grant(connection, beats, start_s)
            self.grants += outcome is None
        except (OSError, ProtocolError) as error:
            self._keeper.give_up(connection)
            return f"lost the broker: {error}"
        except BaseException:
            # An interrupt, perhaps just after the grant, or before the broker was told of a release.
            self.forget()
            self._send_cancel(connection)
            raise
        finally:
            self.waited_s += time.monotonic() - start_s
        return outcome

    def end(self) -> None:
        """Give up what is held, or was asked for."""
        held_on = self._checked_hold()
        if self._fence == _NOT_KNOWN_YET:
            held_on = self._held_on  # also where another job was faster: its turn must not come later
        if held_on is not None:
            self._send_end(held_on)
        # Last, so that an interrupt in between leaves a hold that can still be ended.
        self.forget()

    def forget(self) -> None:
        """Nothing is held, as far as this process is concerned."""
        self._held_on, self._fence = None, 0

    # ---- inside

    def _await_grant(self, connection: BrokerConnection, beats: int, start_s: float) -> str | None:
        """None with the grant in hand, or why there is none."""
        missed_beats = 0
        while True:
            message = connection.receive()
            if message is None:
                beats_now = connection.page.beats
                missed_beats = missed_beats + 1 if beats_now == beats else 0
                beats = beats_now
                if missed_beats == 2:
                    self._keeper.give_up(connection, slow=True)
                    return "the broker does not answer"
            elif message.kind is Kind.GRANT and message.request == self._request:
                if connection.page.fence == message.fence:
                    self._fence, self._held_on = message.fence, connection
                    return None
                # This process was stopped, and the grant has been given on by now.
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
            self._keeper.give_up(connection)

    def _send_cancel(self, connection: BrokerConnection) -> None:
        try:
            connection.send(Kind.CANCEL, request=self._request)
        except OSError:
            self._keeper.give_up(connection)

    def _checked_hold(self) -> BrokerConnection | None:
        """The connection on which it is held, or None, and then counted if it once was."""
        if self.is_held:
            return self._held_on
        self.lost += self._fence != 0
        return None
