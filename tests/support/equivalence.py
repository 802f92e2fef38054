"""One training script under plain DDP and under DeAR, from the same seed: nothing that a user can
see may differ.

A `Case` says what to run. Its `loop` is a generator that reads like the user's own training script:
it gets a `Run`, trains, and yields after each step whatever the user would look at (loss, norms,
outputs). `compare_arms` runs it in both arms on every rank and compares all that was yielded, and
at the end parameters, buffers, gradients and optimizer state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from comparison import leaves, snapshot
from models import INPUTS, OUTPUTS, OddNet
from reference import rank_order_hook, wire_dtype_hook

SEED = 20
# 250 bytes: a weight is larger than a group, the biases and norms of neighbours share one. Smaller groups show no more,
# and cost more than all that they carry.
SMALL_GROUPS_MB = 2.5e-4
# Three plain all-reduces until DDP has built its buckets anew, then the pipeline. Tests count on most steps being its.
STEPS = 14
# From this world size on, the sums of plain DDP depend on gloo's ring; see reference.py.
FIRST_AMBIGUOUS_WORLD_SIZE = 3


Factory = Callable[[nn.Module], "Optimizer | Sequence[Optimizer]"]


def over_parameters(cls: type[Optimizer], model: nn.Module, **options: Any) -> Optimizer:
    """`cls` over all parameters. Used through `optimizer`, since what travels to a rank must have a
    name.
    """
    return cls(model.parameters(), **options)


def optimizer(cls: type[Optimizer], **options: Any) -> Factory:
    """A factory for `Case.optimizer`."""
    return partial(over_parameters, cls, **options)


SGD = optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAMW = optimizer(torch.optim.AdamW, lr=0.01)


def train_step(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The step of every tutorial; the update is pending when it returns. Returns the loss."""
    run.optimizer.zero_grad()
    loss = run.loss(run.model(x), y)
    loss.backward()
    run.optimizer.step()
    return loss


def plain_loop(run: Run) -> Iterator[Any]:
    """The loop of every tutorial."""
    for x, y in run.batches():
        yield train_step(run, x, y)


def until_step(run: Run) -> Iterator[torch.Tensor]:
    """The same without the update, which is left to who takes the losses out."""
    for x, y in run.batches():
        for each in run.optimizers:
            each.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        yield loss


@dataclass(frozen=True)
class Case:
    """A training script and the settings it runs under."""

    loop: Callable[[Run], Iterator[Any]] = plain_loop
    model: Callable[[], nn.Module] = OddNet
    optimizer: Factory = ADAMW
    world_size: int = 2
    steps: int = STEPS
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `DistributedDataParallel`."""
    dear: Mapping[str, Any] = field(default_factory=dict)
    """Options of `dx.attach`, over those that every case has."""
    strict: bool = True
    """Parameters with a pending update hold NaN, so that a stale read cannot pass."""
    pipelined: bool = True
    """The steps must really have been pipelined: most of them, and without any fall-back."""
    exact: bool = True
    """Bitwise. False only where the two arms compute by different formulas, which the case then
    explains.
    """
    reference: tuple[Any, Callable[..., Any]] | None = None
    """State and hook of the other arm, where that is neither plain DDP nor a sum in rank order."""


class Run:
    """One arm of a comparison, as its training script sees it."""

    def __init__(self, case: Case, with_dear: bool) -> None:
        self.case = case
        self.with_dear = with_dear
        self.rank = dist.get_rank()
        self.state: Any = None
        # Once per arm and never again: drawing one random number too many anywhere shifts all that
        # follow.
        torch.manual_seed(SEED)
        self.build()

    def build(self) -> None:
        """A fresh model and optimizer, as after a restart of the script."""
        self.detach()
        self.attached = False
        self.model = DistributedDataParallel(self.case.model(), **self.case.ddp)
        made = self.case.optimizer(self.model)
        self.optimizers = [made] if isinstance(made, Optimizer) else list(made)

    @property
    def optimizer(self) -> Optimizer:
        """The only one, or the first."""
        return self.optimizers[0]

    def attach(self) -> None:
        """Where the user's script has its line `dx.attach(...)`. Left out, it comes before the
        first batch.
        """
        self.attached = True
        if self.with_dear:
            import ddp_crossover as dx  # here, since the reference arm must work without it

            options = {"fusion_mb": SMALL_GROUPS_MB, "strict": self.case.strict} | dict(self.case.dear)
            only = self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers
            self.state = dx.attach(self.model, only, **options)
        elif self.case.reference is not None:
            self.model.register_comm_hook(*self.case.reference)
        elif wire_dtype := self.case.dear.get("wire_dtype"):
            self.model.register_comm_hook(wire_dtype, wire_dtype_hook)
        elif dist.get_world_size() >= FIRST_AMBIGUOUS_WORLD_SIZE:
            self.model.register_comm_hook(None, rank_order_hook)

    def batches(self, per_step: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """`case.steps` times `per_step` batches, different on every rank and of different size."""
        if not self.attached:
            self.attach()
        for index in range(self.case.steps * per_step):
            yield self.batch(index)

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch `index` of this rank, the same whenever it is asked for."""
        generator = torch.Generator().manual_seed(1000 * index + self.rank)
        size = 3 + self.rank
        x = torch.randn(size, INPUTS, generator=generator)
        return x, torch.randn(size, OUTPUTS, generator=generator)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean squared error."""
        return nn.functional.mse_loss(output, target)

    def detach(self) -> None:
        """Where the user's script has `state.detach()`."""
        if self.state is not None:
            self.state.detach()

    def synchronize(self) -> None:
        """`state.synchronize()`, which a script needs before it reads `p.data` itself."""
        if self.state is not None:
            self.state.synchronize()

    def consolidate(self) -> None:
        """`state.consolidate()`, which a script needs before it reads the state of sharded optimizers."""
        if self.state is not None:
            self.state.consolidate()

    def optimizer_state(self) -> dict[str, Any]:
        """The `state_dict()` of the first optimizer."""
        self.consolidate()
        return self.optimizer.state_dict()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """`state.clip_grad_norm_` in the arm that has a state, the stock function in the other."""
        if self.state is not None:
            return self.state.clip_grad_norm_(max_norm, norm_type)
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def grad_scaler(self, own: bool, **options: Any) -> Any:
        """`dx.GradScaler` if `own` and in DeAR's arm, else the stock one."""
        if own and self.with_dear:
            import ddp_crossover as dx

            return dx.GradScaler("cpu", **options)
        return torch.amp.GradScaler("cpu", **options)

    def visible_state(self) -> dict[str, Any]:
        """All that a script can read. No `synchronize()`: a state dict must be right without."""
        self.consolidate()
        return {
            "model": self.model.module.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "gradients": {name: p.grad for name, p in self.model.module.named_parameters()},
        }


def compare_arms(case: Case) -> None:
    """On every rank: run both arms and raise AssertionError at the first difference."""
    expected, expected_state, _ = run_arm(case, with_dear=False)
    assert all(is_finite(expected[step]) for step in range(case.steps // 2)), (
        "this case cannot fail: it diverges by itself, and any NaN equals any other"
    )
    seen, seen_state, stats = run_arm(case, with_dear=True)
    assert expected.keys() == seen.keys(), "the arms took a different number of steps"
    tolerance = {} if case.exact else {"rtol": 1e-5, "atol": 1e-6}
    for step, observed in expected.items():
        assert_same(seen[step], observed, f"step {step}", **tolerance)
    assert_same(seen_state, expected_state, "at the end", **tolerance)
    assert_same_on_all_ranks(seen_state)
    # With the default options the link may turn out so fast, beside a busy machine's compute, that DDP is left alone.
    left_alone = ("DDP trains as it was", "DDP trains by itself")
    left = case.dear.get("fusion_mb", 0) is None and any(why.startswith(left_alone) for why in stats.fallbacks)
    if case.pipelined and not left:
        assert stats.fallbacks == {}, f"fell back: {stats.fallbacks}"
        assert stats.pipelined_iterations > stats.iterations // 2, (
            f"only {stats.pipelined_iterations} of {stats.iterations} iterations were pipelined"
        )


def run_arm(case: Case, with_dear: bool) -> tuple[dict[int, Any], dict[str, Any], Any]:
    """What the loop yielded at each step, what could be seen at the end, and DeAR's statistics."""
    run = Run(case, with_dear)
    observed = {step: snapshot(value) for step, value in enumerate(case.loop(run))}
    state = snapshot(run.visible_state())
    stats = run.state.stats() if run.state is not None else None
    run.detach()
    return observed, state, stats


def check_case(case: Case, on_ranks: Callable[..., Any]) -> None:
    """Run `case` on its ranks; `on_ranks` is the fixture."""
    on_ranks(compare_arms, case.world_size, case)


def is_finite(value: Any) -> bool:
    """Whether all numbers in nested dicts and sequences are finite."""
    tensors = (leaf for leaf in dict(leaves(value)).values() if isinstance(leaf, torch.Tensor))
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def assert_same(actual: Any, expected: Any, where: str, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Equal in structure, dtype and every bit (or within a tolerance); a NaN equals a NaN."""
    actual_leaves, expected_leaves = dict(leaves(actual)), dict(leaves(expected))
    assert actual_leaves.keys() == expected_leaves.keys(), (
        f"{where}: {sorted(actual_leaves.keys() ^ expected_leaves.keys())} in one arm only"
    )
    for path, value in expected_leaves.items():
        if isinstance(value, torch.Tensor) and isinstance(actual_leaves[path], torch.Tensor):
            if _are_equal(actual_leaves[path], value):
                continue
            torch.testing.assert_close(
                actual_leaves[path],
                value,
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                check_stride=True,
                msg=partial("{}: {}: {}".format, where, path.lstrip(".")),
            )
        else:
            assert actual_leaves[path] == value, f"{where}: {path}: {actual_leaves[path]!r} != {value!r}"


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all is the same, without NaN: a quick look before the one that describes differences."""
    is_alike = one.dtype == other.dtype and one.layout == other.layout == torch.strided
    return is_alike and one.stride() == other.stride() and torch.equal(one, other)


def assert_same_on_all_ranks(state: dict[str, Any]) -> None:
    """Every rank holds the same bytes in parameters and optimizer state."""
    shared = dict(leaves({"model": state["model"], "optimizers": state["optimizers"]}))
    digests = {
        path: hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        for path, value in shared.items()
        # Batch statistics are each rank's own until DDP broadcasts them before the next forward.
        if isinstance(value, torch.Tensor) and "running_" not in path and value.numel()
    }
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, digests)
    for rank, others in enumerate(everywhere):
        differing = [path for path in digests if others.get(path) != digests[path]]
        assert not differing, f"rank {rank} differs from rank {dist.get_rank()} in {differing}"
