"""What each rank does: trains one wire on one task, with one seed after the other.

Every wire begins from the same weights and sees the same batches.
"""

import copy
import hashlib
import math
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import ddp_crossover as dx
from accuracy_parts.samples import Data, Samples, batch
from accuracy_parts.tasks import TASKS, final_window, loss_of
from accuracy_parts.wires import NODE_RANKS, WIRES, State
from bench_kit.digest import digests
from bench_kit.launch import tell
from ddp_crossover.addons.codes.wire import CodedWire
from ddp_crossover.addons.weights.split import Speed, split
from ddp_crossover.torch_internals.private import replaced
from train import learning_rate_factor

TEST_BATCH_SIZE = 128
WARM_UP_SHARE = 0.05
TELL_EVERY_STEPS = 10


@dataclass(frozen=True)
class CaseSettings:
    """One wire on one task, with all seeds.

    Attributes:
        task: a name in `tasks.TASKS`.
        wire: a name in `wires.WIRES`.
        ranks: number of ranks.
        seeds: number of seeds, which are 0, 1, and so on.
        steps: steps of training with each seed.
        fusion_mb: size of a fusion group in MiB; None has it tuned.
        evaluate_every: steps from one evaluation on test data to the next; None: only at the end.
    """

    task: str
    wire: str
    ranks: int
    seeds: int
    steps: int
    fusion_mb: float | None
    evaluate_every: int | None = None

    @property
    def name(self) -> str:
        return f"{self.task}, {self.wire}"


def measure(settings: CaseSettings) -> list[dict[str, Any]]:
    """Train with all seeds; returns the runs."""
    os.environ["GROUP_RANK"] = str(dist.get_rank() // NODE_RANKS)
    data = TASKS[settings.task].load()
    return [train(settings, data, seed) for seed in range(settings.seeds)]


def train(settings: CaseSettings, data: Data, seed: int) -> dict[str, Any]:
    """Train with one seed; returns its part of the record, the same on all ranks. Collective.

    Raises:
        RuntimeError: if the parameters differ between ranks at the end, or no step was pipelined.
    """
    task = TASKS[settings.task]
    torch.manual_seed(seed)
    network = task.build()
    is_relaxed = WIRES[settings.wire].is_relaxed
    ddp = DistributedDataParallel(network, gradient_as_bucket_view=True, broadcast_buffers=not is_relaxed)
    optimizer = task.make_optimizer(ddp.parameters())
    warm_up = max(1, round(WARM_UP_SHARE * settings.steps))
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup=warm_up, total=settings.steps))
    held_out = HeldOut(network, data.test, settings.ranks * task.batch_size)
    state, options = _attach(ddp, optimizer, settings)
    losses = []
    held_out.clock_starts()
    for step in range(settings.steps):
        _tell_progress(settings, seed, step)
        mine = own_share(data.train, step, seed, batch_size=task.batch_size, speeds=WIRES[settings.wire].speeds)
        optimizer.zero_grad()
        with weighted(state, settings, len(mine.inputs)):
            loss = loss_of(ddp(mine.inputs), mine.targets)
            loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach() * (len(mine.inputs) / task.batch_size))
        if settings.evaluate_every and (step + 1) % settings.evaluate_every == 0:
            held_out.evaluate(step + 1, state)
    facts: dict[str, Any] = {}
    if isinstance(state, dx.relaxed.RelaxedState):
        state.consolidate()
        stats = state.stats()
        facts = {"sent_bytes_per_step": stats.sent_bytes / settings.steps, "means": stats.means}
    elif isinstance(state, dx.DearState):
        state.synchronize()
        facts = pipeline_facts(state)
    train_s = held_out.clock_stops()
    digest = same_parameters_everywhere(network)
    curve = mean_over_ranks(torch.stack(losses).double())
    result = {
        "seed": seed,
        "train_s": train_s,
        "options": options,
        "parameters_sha256": digest,
        "final_train_loss": finite(curve[-final_window(len(curve)) :].mean().item()),
        **test(network, data.test),
        **facts,
        "losses": [finite(loss) for loss in curve.tolist()],
        "held_out": held_out.points,
    }
    if state is not None:
        state.detach()
    return result


class HeldOut:
    """Takes the loss on test data now and then, of the mean over ranks, without a change to what is trained.

    Args:
        network: what is trained.
        samples: test data.
        batch_size: samples of a step of all ranks.

    Attributes:
        points: for each evaluation, steps, samples and seconds of training before it, and the loss.
    """

    def __init__(self, network: nn.Module, samples: Samples, batch_size: int) -> None:
        self._network = network
        self._copy = copy.deepcopy(network)
        self._samples = samples
        self._batch_size = batch_size
        self._before_s = self._since_s = 0.0
        self.points: list[dict[str, float | None]] = []

    def clock_starts(self) -> None:
        """Count time of training from now on, on all ranks."""
        dist.barrier()
        self._since_s = time.perf_counter()

    def clock_stops(self) -> float:
        """Count no more; returns all seconds so far."""
        self._before_s += time.perf_counter() - self._since_s
        return self._before_s

    @torch.no_grad()
    def evaluate(self, steps: int, state: State | None) -> None:
        """Add a point. Collective."""
        if isinstance(state, dx.DearState):
            state.synchronize()
        train_s = self.clock_stops()
        # In one piece: on a link with a long delay, one all-reduce for each parameter would take most of the time.
        mean = mean_over_ranks(nn.utils.parameters_to_vector(self._network.parameters()))
        nn.utils.vector_to_parameters(mean, self._copy.parameters())
        for own, trained in zip(self._copy.buffers(), self._network.buffers(), strict=True):
            own.copy_(trained)
        loss = test(self._copy, self._samples)["test_loss"]
        samples = steps * self._batch_size
        self.points.append({"steps": steps, "samples": samples, "train_s": train_s, "test_loss": loss})
        self.clock_starts()


def own_share(train: Samples, step: int, seed: int, *, batch_size: int, speeds: Sequence[int]) -> Samples:
    """This rank's samples of a step. Whatever the shares, those of all ranks together are the same."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    of_ranks = [
        batch(train, step, seed, batch_size=batch_size, rank=one, world_size=world_size)
        for one in (range(world_size) if speeds else [rank])
    ]
    inputs, targets = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))
    if not speeds:
        return Samples(inputs, targets)
    of_speed = [Speed(0.0, 1.0 / speeds[one % len(speeds)]) for one in range(world_size)]
    sizes = split(len(inputs), of_speed, [len(inputs)] * world_size)
    low = sum(sizes[:rank])
    return Samples(inputs[low : low + sizes[rank]], targets[low : low + sizes[rank]])


def weighted(state: State | None, settings: CaseSettings, count: int) -> AbstractContextManager[None]:
    """The context in which a batch of this many samples has its weight."""
    return state.batch(count) if isinstance(state, dx.DearState) and WIRES[settings.wire].speeds else nullcontext()


def _attach(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, settings: CaseSettings
) -> tuple[State | None, dict[str, str]]:
    """The state, and all options as text. Plain DDP has neither."""
    wire = WIRES[settings.wire]
    make_options = wire.options
    if make_options is None:
        return None, {}
    # Where time does not count, a plan that is fixed: the tuner would try plain all-reduces, which do not compress.
    is_tuned = settings.fusion_mb is None or WIRES[settings.wire].is_relaxed
    pipeline = {} if is_tuned else {"tune": False, "fusion_mb": settings.fusion_mb}
    options = pipeline | make_options()
    with replaced(CodedWire, "has_feedback", wire.has_feedback):
        state: State = dx.attach(ddp, optimizer, **options)
    return state, {name: str(value) for name, value in options.items()}


def pipeline_facts(state: dx.DearState) -> dict[str, Any]:
    """What shows that gradients travelled as they should have.

    Raises:
        RuntimeError: if no step was pipelined.
    """
    stats = state.stats()
    if not stats.pipelined_iterations and not state.detached:
        raise RuntimeError(
            f"no step was pipelined, so no gradient travelled as this wire says: give more --steps; fallbacks: "
            f"{dict(stats.fallbacks)}"
        )
    sent_bytes = [step.sent_bytes for step in stats.last_steps]
    return {
        "pipelined_steps": stats.pipelined_iterations,
        "fallbacks": dict(stats.fallbacks),
        "plan": str(state.plan),
        "sent_bytes_per_step": statistics.median_low(sent_bytes) if sent_bytes else None,
    }


def _tell_progress(settings: CaseSettings, seed: int, step: int) -> None:
    if step % TELL_EVERY_STEPS == 0:
        behind = (seed + step / settings.steps) / settings.seeds
        tell(f"seed {seed + 1} of {settings.seeds}, step {step} of {settings.steps}", behind)


def same_parameters_everywhere(network: nn.Module) -> str:
    """Return the SHA-256 of all parameters. Collective.

    Raises:
        RuntimeError: if ranks have different bits.
    """
    # Bits, not values: NaN is not equal to itself, and ranks that all diverged alike are in step.
    own = hashlib.sha256(str(digests(list(network.parameters()))).encode()).hexdigest()
    of_ranks = [""] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    if len(set(of_ranks)) > 1:
        raise RuntimeError(f"parameters differ between ranks after training, SHA-256 per rank: {of_ranks}")
    return own


@torch.no_grad()
def test(network: nn.Module, samples: Samples) -> dict[str, float | None]:
    """Loss and accuracy on all test samples, a share of which each rank takes. Collective."""
    # BatchNorm's running statistics are each rank's own after the last step; DDP would take those of rank 0.
    for buffer in network.buffers():
        dist.broadcast(buffer, src=0)
    network.eval()
    inputs, targets = (part[dist.get_rank() :: dist.get_world_size()] for part in samples)
    sums = torch.zeros(3, dtype=torch.float64)
    for some, wanted in zip(inputs.split(TEST_BATCH_SIZE), targets.split(TEST_BATCH_SIZE), strict=True):
        logits = network(some)
        loss_sum = loss_of(logits, wanted).item() * wanted.numel()
        correct = (logits.argmax(-1) == wanted).sum().item()
        sums += torch.tensor([loss_sum, correct, wanted.numel()], dtype=torch.float64)
    dist.all_reduce(sums)
    loss_sum, correct, count = sums.tolist()
    return {"test_loss": finite(loss_sum / count), "test_accuracy": correct / count}


def mean_over_ranks(values: Tensor) -> Tensor:
    """The mean of each value. Collective."""
    dist.all_reduce(values)
    return values / dist.get_world_size()


def finite(value: float) -> float | None:
    """The value, or None, which JSON has, for NaN and infinity, which it lacks."""
    return value if math.isfinite(value) else None
