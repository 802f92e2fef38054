"""Which leg does not end is said by name, once, and only while the stream stands at it."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from ddp_crossover.nccl import leg_watch
from ddp_crossover.nccl.leg_watch import LegWatch

TIMEOUT_S = 100.0


class Event:
    """Happens when the test says so."""

    def __init__(self, has_happened: bool = False) -> None:
        self.has_happened = has_happened

    def query(self) -> bool:
        return self.has_happened


class Watched:
    """A watch whose clock and events the test moves."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._log = caplog
        self.watch = LegWatch(3, TIMEOUT_S)

    @property
    def said(self) -> list[str]:
        return [record.getMessage() for record in self._log.records]

    def leg(self, label: str, begun: bool = True) -> tuple[Event, Event]:
        events = Event(begun), Event()
        self.watch.add(label, *events)
        return events


@pytest.fixture
def watched(caplog) -> Watched:
    return Watched(caplog)


def test_the_first_leg_that_does_not_end_is_named_once(watched) -> None:
    _, done = watched.leg("scatter leg of fusion group 0")
    watched.leg("scatter leg of fusion group 1")
    watched.leg("gather leg of fusion group 0")
    watched.watch.look(0.0)
    done.has_happened = True
    watched.watch.look(10.0)
    watched.watch.look(59.0)
    assert watched.said == []
    watched.watch.look(61.0)
    watched.watch.look(70.0)
    assert watched.said == [
        "rank 3: the scatter leg of fusion group 1 has not ended for 51 s: a peer has died, or is that late. NCCL's "
        "watchdog ends this process after 100 s"
    ]


def test_a_leg_that_waits_for_compute_is_not_a_stall(watched) -> None:
    begun, _ = watched.leg("scatter leg of fusion group 0", begun=False)
    watched.watch.look(0.0)
    watched.watch.look(1000.0)
    begun.has_happened = True
    watched.watch.look(1001.0)
    watched.watch.look(1040.0)
    assert watched.said == []
    watched.watch.look(1060.0)
    assert len(watched.said) == 1


def test_few_legs_are_kept_while_they_end(watched) -> None:
    for _ in range(1000):
        _, done = watched.leg("leg")
        done.has_happened = True
    assert len(watched.watch._legs) < 3


def test_its_thread_ends_with_it(monkeypatch) -> None:
    monkeypatch.setattr(leg_watch, "_POLL_S", 0.01)

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "ddp_crossover-leg-watch"]

    before = set(threads())
    dropped, closed = LegWatch(0, 1.0), LegWatch(0, 1.0)
    (first, second) = [thread for thread in threads() if thread not in before]
    closed.close()
    reference = weakref.ref(dropped)
    del dropped
    gc.collect()
    first.join(10)
    second.join(10)
    assert reference() is None
    assert not first.is_alive() and not second.is_alive()
