"""The lease as a job sees it."""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

from .keeper import Keeper
from .places import Place
from .protocol import Hello, Kind, Role, require_sound
from .resources import default_resource, drain, is_gpu
from .turn import Turn

if TYPE_CHECKING:
    import torch

    from .instrument import Instrument

logger = logging.getLogger("ddp_crossover")

_ROLES = {"peer": Role.PEER, "filler": Role.FILLER}
_PEER_MAX_WAIT_S = 15.0  # longer than the 10 s after which the broker gives on what a holder does not release


@dataclass(frozen=True)
class LeaseStats:
    """Figures of one process since it made its lease.

    Attributes:
        grants: how often the resource was granted.
        unleased: for each reason, how often the job went on without.
        lost: how often the broker ended a hold: it was too long, or the broker went away.
        waited_s: time spent waiting for grants, also in vain.
    """

    grants: int
    unleased: Mapping[str, int]
    lost: int
    waited_s: float


class GpuLease:
    """A share in a GPU that several jobs on this host use in turn: one computes while the others communicate.

    It affects speed only. Whatever happens to the broker, to this lease or to another job, nothing is raised here
    and nothing waits for longer than it says: the job goes on unleased, which is counted in :meth:`stats` and logged
    once for each reason. All methods are thread-safe. A forked child has no part in the lease: there it does nothing.

    Args:
        resource: ``"GPU-<uuid>"`` or ``"cpu:<n>"``. None for the current CUDA device, or without CUDA for the first
            core that this process may run on.
        job: a name that all ranks of the job share and no other job of this user has. Ranks of one job on one
            resource hold it together.
        weight: share of the time relative to other jobs while they compete, 0.01 to 100.
        role: ``"filler"`` for a job that gets only what no peer wants and is asked to yield as soon as one does.
        max_wait_s: how long :meth:`acquire` waits for other jobs before it goes on unleased. None: 15 s for a peer; a
            filler waits for as long as the broker lives.
        max_stall_s: how long :meth:`acquire` waits for a broker that shows no sign of life, at least 0.1. More than the
            default helps on a host whose cores are all busy.
        directory: where the broker's socket is. See :class:`.places.Place`.
        spawn_broker: start a broker where there is none.

    Raises:
        ValueError: for a weight, name or role that cannot be.

    Example::

        lease = GpuLease(job="resnet-a")
        for batch in loader:
            with lease.held():
                loss = compute(batch)
            communicate(loss)  # another job's turn
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
        if role not in _ROLES:
            raise ValueError(f"role must be 'peer' or 'filler', got {role!r}")
        if max_wait_s is not None and not max_wait_s >= 0:
            raise ValueError(f"max_wait_s must not be negative, got {max_wait_s}")
        if not 0.1 <= max_stall_s < math.inf:
            raise ValueError(f"max_stall_s must be at least 0.1, got {max_stall_s}")
        self.resource = resource if resource is not None else default_resource()
        self.job = job
        self.role = role
        hello = Hello(job, self.resource, _ROLES[role], float(weight))
        require_sound(hello)
        if max_wait_s is None:
            max_wait_s = _PEER_MAX_WAIT_S if role == "peer" else math.inf
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may come in between
        self._unleased: Counter[str] = Counter()
        itself = weakref.ref(self)
        # Two looks without a beat; the broker beats every 20 ms while somebody waits.
        look_s = 0.4 * max_stall_s
        self._keeper = Keeper(Place(directory), hello, look_s, spawn_broker)
        self._turn = Turn(self._keeper, hello, max_wait_s)
        self._finalizer = weakref.finalize(self, self._keeper.stop)
        os.register_at_fork(after_in_child=lambda: _forget_in_child(itself))

    # ---- holding

    def acquire(self, *, eager: bool = False) -> bool:
        """Wait for the resource, and tell whether it is held now; False means: go on unleased.

        With ``eager``, where nobody holds it or waits, it counts as held as soon as it has been asked for: the answer
        is only a matter of time, and to sleep until it comes takes longest where all cores are busy. If another job
        was faster after all, :attr:`holding` turns False. Fillers always wait.

        Waits for other jobs for at most ``max_wait_s``, and for a broker that does not answer for at most
        ``max_stall_s``. Never call it with a collective, a data loader or a checkpoint ahead that another job might be
        needed for: acquire after the communication, release before it. Does nothing while it is held.
        """
        if os.getpid() != self._pid:
            return False
        with self._lock:
            return self.holding or (eager and self._turn.ask_if_free()) or self._ask(Kind.REQUEST)

    def release(self, stream: torch.cuda.Stream | None = None) -> None:
        """Give the resource up. If another job waits for it, not before ``stream`` (None: the current one) has done all
        that was queued on it; with nobody there, that wait would protect nobody.

        On a CPU resource there is nothing to wait for. Does nothing where nothing is held.
        """
        if os.getpid() != self._pid or not self._turn.is_asked_for:
            return
        try:
            if self.contended:
                drain(self.resource, stream)
        finally:
            with self._lock:
                self._turn.end()

    def yield_turn(self, stream: torch.cuda.Stream | None = None) -> bool:
        """Let whoever is behind in weighted time go first, then hold again: for jobs that have no gaps.

        Does nothing unless somebody waits. Returns and waits as :meth:`acquire`, and before it as :meth:`release`.
        """
        if os.getpid() != self._pid:
            return False
        if self.holding:
            if not self.contended:
                return True
            drain(self.resource, stream)
        with self._lock:
            return self._ask(Kind.RELEASE if self.holding else Kind.REQUEST)

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Hold it inside of a ``with``, which gives what :meth:`acquire` returned. Nested ones do nothing."""
        outermost = not self.holding
        try:
            try:
                yield self.acquire()
            finally:
                if outermost:
                    self.release()
        except BaseException:
            if outermost:
                self.release()  # an interrupt may have hit the first one
            raise

    def instrument(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        quantum_ms: float = 5.0,
        run_ahead_ms: float = 4.0,
    ) -> Instrument:
        """Let ``model`` hold the lease while it computes: for jobs that train or infer on one GPU, in one thread.

        It is held from the beginning of a forward to its end or, where a backward follows as it did last time, to the
        end of that; with ``optimizer``, to the end of the step that follows. Meanwhile it looks, at each module and
        gradient, whether somebody waits. Then it is given up and asked for again: at once by a filler that is asked to
        yield, else once it has been held for ``quantum_ms``. Where nobody waits, a look takes about a microsecond.

        It changes no number. Compiled modules are looked at from outside only, and so are torch's
        ``TransformerEncoderLayer``; CUDA graphs run no hooks. A copy of the model takes part in the lease, too.

        Args:
            quantum_ms: how long the job holds it before it lets another one of equal rights go first.
            run_ahead_ms: GPU time of kernels that a filler may have queued. The GPU is given back within that, or when
                the module that is running is done.

        Returns:
            a handle: ``remove()``, or the end of a ``with`` block, takes the hooks down.

        Raises:
            ValueError: for a DDP model, one compiled by ``model.compile()``, or a time that is not positive.

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
        # Here, since it needs torch, which the rest of the lease does without.
        from .instrument import Instrument, gpu_run_ahead

        queues = self.role == "filler" and is_gpu(self.resource)
        run_ahead = gpu_run_ahead(run_ahead_ms / 1e3) if queues else None
        return Instrument(self, model, optimizer, quantum_ms / 1e3, run_ahead)

    # ---- looking

    @property
    def contended(self) -> bool:
        """Whether another job waits for the resource. A read of shared memory, no system call."""
        connection = self._keeper.connection
        return connection is not None and connection.page.waiters > 0

    @property
    def pressed(self) -> bool:
        """Whether another job waits that is entitled to a turn of its own. A filler is not, while a peer holds."""
        connection = self._keeper.connection
        return connection is not None and connection.page.pressed > 0

    @property
    def taken(self) -> bool:
        """Whether another job holds the resource now. A read of shared memory, too."""
        return self._turn.is_taken

    @property
    def holding(self) -> bool:
        """Whether this process holds the resource now. The broker may have ended the hold meanwhile."""
        return self._turn.is_held

    @property
    def undisturbed(self) -> bool:
        """Holding, and not pressed: the cheapest way to see that there is nothing to do."""
        return self._turn.is_undisturbed

    @property
    def asked_to_yield(self) -> bool:
        """Whether this is a filler that holds what a peer waits for: release as soon as can be."""
        return self._turn.is_asked_to_yield

    @property
    def fence(self) -> int:
        """The number under which it is held, greater with every grant of this host; 0 if not, or not known yet."""
        return self._turn.fence if self.holding else 0

    @property
    def connected(self) -> bool:
        """Whether there is a broker now."""
        return self._keeper.connection is not None

    def wait_until_connected(self, timeout_s: float) -> bool:
        """Wait for a broker. Training has no need to: it starts unleased."""
        return os.getpid() == self._pid and self._keeper.connected.wait(timeout_s)

    def stats(self) -> LeaseStats:
        turn = self._turn
        return LeaseStats(turn.grants, dict(self._unleased), turn.lost, turn.waited_s)

    # ---- the end

    def close(self) -> None:
        """Leave for good. The job goes on unleased."""
        self._finalizer()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GpuLease cannot be pickled: make one in each process that computes")

    def _forget_in_child(self) -> None:
        # Not under the lock, which a thread of the parent may have held when it forked.
        self._turn.forget()
        self._keeper.forget_in_child()

    # ---- inside

    def _ask(self, kind: Kind) -> bool:
        reason = self._turn.ask(kind)
        return reason is None or self._go_unleased(reason)

    def _go_unleased(self, reason: str) -> bool:
        if not self._unleased[reason]:
            logger.warning("ddp_crossover: %s runs without its lease on %s: %s", self.job, self.resource, reason)
        self._unleased[reason] += 1
        return False


def _forget_in_child(lease: weakref.ref[GpuLease]) -> None:
    if (itself := lease()) is not None:
        itself._forget_in_child()
