"""The public interface of the lease, used by jobs."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

from ..directory import BrokerDirectory
from ..peer_process import require_linux
from ..protocol import Hello, Kind, Role, require_valid
from .draining import POLL_S, Draining, queued_work
from .reconnect import Reconnector
from .turn import Turn

if TYPE_CHECKING:
    import torch

    from ddp_crossover.device import Stream

    from .instrument import Instrument

logger = logging.getLogger("ddp_crossover")

_GPU = "GPU-"
_ROLES = {"peer": Role.PEER, "filler": Role.FILLER}
_PEER_MAX_WAIT_S = 15.0  # longer than the 10 s after which the broker evicts a holder


@dataclass(frozen=True)
class LeaseStats:
    """Counters of one process since it created its lease.

    Attributes:
        grants: how often the resource was granted.
        unleased: for each reason, how often the job continued without the lease.
        lost: how often a hold ended without a release, because it was too long or the broker went away.
        waited_s: seconds spent waiting for grants, including waits that ended without a grant.
    """

    grants: int
    unleased: Mapping[str, int]
    lost: int
    waited_s: float


class GpuLease:
    """A lease on a GPU that several jobs on this host use in turn: one computes while the others communicate.

    The lease affects speed only. If the broker, this lease or another job fails, no method raises or waits beyond the
    limits below: the job continues unleased, which is counted in :meth:`stats` and logged once per reason. All methods
    are thread-safe. In a forked child they do nothing.

    Args:
        resource: ``"GPU-<uuid>"`` or ``"cpu:<n>"``. None for the current CUDA device, or without CUDA for the first
            core that this process may run on.
        job: a name that all ranks of the job share and that no other job of this user has. Ranks of one job on one
            resource hold it together.
        weight: share of the time relative to other jobs while they compete, 0.01 to 100.
        role: ``"filler"`` for a job that is granted the resource only while no peer waits for it, and that is asked to
            yield as soon as a peer does.
        max_wait_s: seconds that :meth:`acquire` waits for other jobs before it continues unleased. None: 15 s for a
            peer; a filler waits for as long as the broker lives.
        max_stall_s: seconds that :meth:`acquire` waits for a broker that shows no sign of life, at least 0.1. A larger
            value than the default helps on a host whose cores are all busy.
        directory: directory of the broker's socket. Default: ``$DDP_CROSSOVER_LEASE_DIR``, else one of this user.
        spawn_broker: start a broker if none is running.

    Raises:
        OSError: the system is not Linux.
        ValueError: ``weight``, ``job``, ``resource``, ``role``, ``max_wait_s`` or ``max_stall_s`` is invalid.

    Example::

        lease = GpuLease(job="resnet-a")
        for batch in loader:
            with lease.held():
                loss = compute(batch)
            communicate(loss)  # another job may compute now
    """

    def __init__(
        self,
        resource: str | None = None,
        *,
        job: str,
        weight: float = 1.0,
        role: Literal["peer", "filler"] = "peer",
        max_wait_s: float | None = None,
        max_stall_s: float = 0.1,
        directory: str | os.PathLike[str] | None = None,
        spawn_broker: bool = True,
    ) -> None:
        require_linux()
        if role not in _ROLES:
            raise ValueError(f"role must be 'peer' or 'filler', got {role!r}")
        if max_wait_s is not None and not max_wait_s >= 0:
            raise ValueError(f"max_wait_s must be 0 or more, got {max_wait_s}")
        if not 0.1 <= max_stall_s < math.inf:
            raise ValueError(f"max_stall_s must be at least 0.1, got {max_stall_s}")
        self.resource = resource if resource is not None else _default_resource()
        self.job = job
        self.role = role
        hello = Hello(job, self.resource, _ROLES[role], float(weight))
        require_valid(hello)
        self._is_gpu = self.resource.startswith(_GPU)  # where work is queued and runs later
        if max_wait_s is None:
            max_wait_s = _PEER_MAX_WAIT_S if role == "peer" else math.inf
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: a signal handler may call the lease while this thread holds it
        self._unleased: Counter[str] = Counter()
        itself = weakref.ref(self)
        # A wait gives the broker up after two time-outs without a beat; it beats every 20 ms while any job waits.
        receive_timeout_s = 0.4 * max_stall_s
        self._reconnector = Reconnector(BrokerDirectory(directory), hello, receive_timeout_s, spawn_broker)
        self._turn = Turn(self._reconnector, hello, max_wait_s)
        self._max_wait_s = max_wait_s
        self._draining = Draining(self._lock, self._turn)
        self._finalizer = weakref.finalize(self, self._reconnector.stop)
        os.register_at_fork(after_in_child=lambda: _forget_in_child(itself))

    # ---- holding

    def acquire(self, *, eager: bool = False) -> bool:
        """Wait for the resource and return whether it is held; on False, continue unleased.

        With ``eager``, a resource that is free and has no waiting jobs counts as held once the request is sent. The
        grant will follow, and sleeping until it arrives takes longest on hosts whose cores are all busy. If another
        job was granted the resource first, :attr:`holding` turns False. Fillers always wait.

        Waits at most ``max_wait_s`` for other jobs, and at most ``max_stall_s`` for a broker that does not answer.
        Acquire after communication and release before it: do not hold the resource during a collective, a data loader
        or a checkpoint that may need another job to progress. Does nothing if the resource is already held.
        """
        if os.getpid() != self._pid:
            return False
        with self._lock:
            if not self.contended:
                self._draining.cancel()  # the last turn goes on
        # Another job waits for the end of the last turn: what was queued in it must be done first.
        if not self._draining.wait(self._max_wait_s):
            self._count_unleased(f"its own work on the device was not done within {self._max_wait_s} s")
            return False
        with self._lock:
            self._draining.cancel()
            return self.holding or (eager and self._turn.request_if_free()) or self._request(Kind.REQUEST)

    def release(self, stream: Stream | None = None) -> None:
        """Give up the resource, on a GPU as soon as it has done all work queued on ``stream`` (None: the current one).

        Never blocks: a thread looks at the device. Until then :attr:`holding` is False, other jobs wait, and
        :meth:`acquire` takes the resource back at once if none does. Does nothing if the resource is neither held nor
        requested.
        """
        if os.getpid() == self._pid and self._turn.must_be_ended:
            self.release_when(self._queued_work(stream))

    def release_when(self, is_drained: Callable[[], bool] | None) -> None:
        """Like :meth:`release`, as soon as ``is_drained()``; None means now.

        Args:
            is_drained: whether the device has nothing more to do for this job. A thread asks repeatedly, so it must
                be thread-safe, must not block and must not raise.
        """
        if os.getpid() != self._pid or not self._turn.must_be_ended:
            return
        with self._lock:
            if is_drained is None or is_drained():
                self._draining.end_turn()
            else:
                self._draining.begin(is_drained)

    def yield_turn(self, stream: Stream | None = None) -> bool:
        """Let a waiting job that is behind in weighted time go first, then hold again: for jobs without gaps.

        If the resource is held and another job waits, waits until the device has done what is queued on ``stream``,
        then waits and returns like :meth:`acquire`. If no other job waits, keeps the hold and returns True. If nothing
        is held, acquires.
        """
        if os.getpid() != self._pid:
            return False
        if self.holding:
            if not self.contended:
                return True
            is_drained = self._queued_work(stream)
            while is_drained is not None and self._turn.is_held and not is_drained():
                time.sleep(POLL_S)
        elif self._draining.is_under_way:
            return self.acquire()
        with self._lock:
            return self._request(Kind.RELEASE if self.holding else Kind.REQUEST)

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Hold the resource in a ``with`` block, which yields the result of :meth:`acquire`. Blocks may be nested."""
        with self._lock:
            outermost = not self.holding
        try:
            try:
                yield self.acquire()
            finally:
                if outermost:
                    self.release()
        except BaseException:
            if outermost:
                self.release()  # an interrupt may have cut the first release short
            raise

    def instrument(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        quantum_ms: float = 5.0,
        run_ahead_ms: float = 4.0,
    ) -> Instrument:
        """Make ``model`` hold the lease while it computes: for jobs that train or infer on one GPU, in one thread.

        See ``docs/lease.md`` for when the lease is held. Numerical results do not change.

        Args:
            model: the model to put hooks on.
            optimizer: the optimizer whose steps belong to the turns; None to end turns with backward.
            quantum_ms: milliseconds that the job holds the lease before it yields to another job of equal rights.
            run_ahead_ms: milliseconds of GPU work that a filler may have queued. A filler gives the GPU back within
                that time, or when the running module is done if that takes longer.

        Returns:
            a handle whose ``remove()``, or end of a ``with`` block, removes the hooks.

        Raises:
            ValueError: ``model`` is a DDP model or was compiled by ``model.compile()``, or a time is not positive.

        Example::

            with lease.instrument(model, optimizer):
                for x, y in loader:
                    loss_fn(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        """
        for name, value in (("quantum_ms", quantum_ms), ("run_ahead_ms", run_ahead_ms)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        # Import here: instrument.py needs torch, and the rest of the lease must load without it.
        from .instrument import Instrument, gpu_run_ahead

        queues = self.role == "filler" and self._is_gpu
        run_ahead = gpu_run_ahead(run_ahead_ms / 1e3) if queues else None
        return Instrument(self, model, optimizer, quantum_ms / 1e3, run_ahead)

    # ---- state

    @property
    def contended(self) -> bool:
        """Whether another job waits for the resource. Reads shared memory, without a system call."""
        return self._turn.is_contended

    @property
    def pressed(self) -> bool:
        """Whether a waiting job is entitled to a turn of its own. A filler is not entitled while a peer holds."""
        connection = self._reconnector.connection
        return connection is not None and connection.page.pressed > 0 and self.contended

    @property
    def taken(self) -> bool:
        """Whether another job currently holds the resource. Reads shared memory, without a system call."""
        return self._turn.is_taken

    @property
    def holding(self) -> bool:
        """Whether this process currently holds the resource. False once it was released or the broker has ended it."""
        return not self._draining.is_under_way and self._turn.is_held

    @property
    def draining(self) -> bool:
        """Whether this process has released the resource, and the device has not done what was queued before."""
        return self._draining.is_under_way

    @property
    def released_s(self) -> float:
        """Time, as of ``time.perf_counter()``, at which this process last gave the resource up; before, ``-inf``."""
        return self._draining.ended_s

    @property
    def undisturbed(self) -> bool:
        """Whether this process holds the resource and is not pressed. The cheapest check in the usual case."""
        return self._turn.is_undisturbed and not self._draining.is_under_way

    @property
    def asked_to_yield(self) -> bool:
        """Whether this is a filler that holds while a peer waits, and should release."""
        return self._turn.is_asked_to_yield and not self._draining.is_under_way

    @property
    def fence(self) -> int:
        """Number of the current hold, which grows with every new hold on this host; 0 if not held or not yet known."""
        return self._turn.fence if self.holding else 0

    @property
    def connected(self) -> bool:
        """Whether a broker is connected now."""
        return self._reconnector.connection is not None

    def wait_until_connected(self, timeout_s: float) -> bool:
        """Wait for a connection and return whether there is one. Training need not wait: it starts unleased."""
        return os.getpid() == self._pid and self._reconnector.connected.wait(timeout_s)

    def stats(self) -> LeaseStats:
        """Return how often this process has held the lease, and computed without it."""
        turn = self._turn
        return LeaseStats(turn.grants, dict(self._unleased), turn.lost, turn.waited_s)

    # ---- closing

    def close(self) -> None:
        """Disconnect permanently. The job continues unleased."""
        self._finalizer()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GpuLease cannot be pickled: make one in each process that computes")

    def _forget_in_child(self) -> None:
        # Do not take the lock: another thread of the parent may have held it at the fork.
        self._draining.forget_in_child()
        self._turn.forget()
        self._reconnector.forget_in_child()

    # ---- internals

    def _queued_work(self, stream: Stream | None) -> Callable[[], bool] | None:
        return queued_work(stream) if self._is_gpu else None

    def _request(self, kind: Kind) -> bool:
        """Request the resource and wait. Returns whether it is held; if not, counts and logs the reason."""
        why_not = self._turn.request(kind)
        if why_not is not None:
            self._count_unleased(why_not)
        return why_not is None

    def _count_unleased(self, why_not: str) -> None:
        if not self._unleased[why_not]:
            logger.warning("job %s runs without its lease on %s: %s", self.job, self.resource, why_not)
        self._unleased[why_not] += 1


def _forget_in_child(lease: weakref.ref[GpuLease]) -> None:
    if (itself := lease()) is not None:
        itself._forget_in_child()


def _default_resource() -> str:
    """The current CUDA device as ``GPU-<uuid>``, or the first core that this process may run on as ``cpu:<n>``."""
    from ddp_crossover import device as gpu  # import here: it loads torch

    return f"{_GPU}{uuid}" if (uuid := gpu.uuid()) else f"cpu:{min(os.sched_getaffinity(0))}"
