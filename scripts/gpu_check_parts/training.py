"""A small training job with every setting that the checks vary, run with plain DDP or with DeAR."""

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpu_check_parts.models import INPUTS, MODELS, OUTPUTS

SEED = 20
# Cut the small models into several DDP buckets and fusion groups.
BUCKET_MB = 0.01
FUSION_MB = 0.008
INITIAL_LOSS_SCALE = 2.0**12
MAX_NORM = 0.1  # the losses here have gradients of norm 0.2 and more, so this clips


@dataclass(frozen=True)
class Recipe:
    """What a training job does.

    Attributes:
        optimizer: name of a class in ``torch.optim``, or of one of ours.
        options: its keyword arguments.
        model: a name in ``MODELS``.
        dtype: of the parameters.
        bucket_view: DDP's ``gradient_as_bucket_view``.
        strict: DeAR's ``strict``.
        accumulate: backward passes per step, all but the last under ``no_sync``.
        clip: ``stock`` or ``own`` gradient clipping; empty for none.
        scaler: ``stock`` or ``own`` loss scaler; empty for none.
        poisoned_step: step whose gradients overflow; -1 for none.
        autocast: dtype of autocast; empty for none.
        set_to_none: argument of ``zero_grad``.
        steps: optimizer steps.
        fusion_mb: size of a fusion group; None to let DeAR find it.
        wire_dtype: DeAR's ``wire_dtype``; empty for none. Plain DDP then gets a hook that does the same, but for codes.
        schedule: DeAR's ``schedule``.
        compiled: backend of ``torch.compile`` for the network; empty to run it as it is.
        copy_engines: whether gather legs are to run on copy engines.
        attached: further options of ``attach``.
    """

    optimizer: str = "SGD"
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.05})
    model: str = "odd"
    dtype: str = "float32"
    bucket_view: bool = True
    strict: bool = False
    accumulate: int = 1
    clip: str = ""
    scaler: str = ""
    poisoned_step: int = -1
    autocast: str = ""
    set_to_none: bool = True
    steps: int = 16
    fusion_mb: float | None = FUSION_MB
    wire_dtype: str = ""
    schedule: str = "auto"
    compiled: str = ""
    copy_engines: bool = False
    attached: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads_gradients(self) -> bool:
        """Stock clipping and the stock scaler look at gradients, so no update can be deferred."""
        return "stock" in (self.clip, self.scaler) and not self.norms_of_shards

    @property
    def weighted(self) -> bool:
        """Whether the state is told how many samples a batch has."""
        return bool(self.attached.get("weighted"))

    @property
    def sharded(self) -> bool:
        """Whether each rank keeps its share of the optimizer's state."""
        return bool(self.attached.get("shard_optimizer"))

    @property
    def norms_of_shards(self) -> bool:
        """Whether stock functions, too, take norms from shards."""
        return self.attached.get("norms") == "sharded"

    @property
    def exact(self) -> bool:
        """Norms of shards are added up in another order than those of the stock function."""
        return self.clip != "own" and not (self.clip and self.norms_of_shards)


def _zero_cta_group() -> Any:
    nccl: Any = dist.ProcessGroupNCCL  # of which torch declares a part only
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    return dist.new_group(pg_options=options)


def _optimizer_class(name: str) -> Any:
    if hasattr(torch.optim, name):
        return getattr(torch.optim, name)
    import ddp_crossover as dx  # here, so that plain DDP runs without it

    return getattr(dx.optim, name)


def cast_hook(wire_dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Does what ``wire_dtype`` does, on one and two ranks, where a sum has only one order."""
    sent = torch.mul(bucket.buffer(), 1.0 / dist.get_world_size()).to(wire_dtype)
    dist.all_reduce(sent)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().copy_(sent))
    return future


class Job:
    """One training job on one rank."""

    def __init__(self, recipe: Recipe, device: torch.device, rank: int, with_dear: bool) -> None:
        self.recipe, self.device, self.rank = recipe, device, rank
        torch.manual_seed(SEED)
        net: Any = MODELS[recipe.model]().to(device, getattr(torch, recipe.dtype))
        if recipe.compiled:
            net = torch.compile(net, backend=recipe.compiled)
        device_ids = [device.index] if device.type == "cuda" else None
        self.ddp = DistributedDataParallel(
            net,
            device_ids=device_ids,
            gradient_as_bucket_view=recipe.bucket_view,
            # Where DDP splits a compiled graph, no bucket may be smaller than its first one, which has 1 MiB.
            bucket_cap_mb=None if recipe.compiled else BUCKET_MB,
        )
        self.optimizer = _optimizer_class(recipe.optimizer)(self.ddp.parameters(), **recipe.options)
        self.parameters = list(self.ddp.parameters())
        self.state: Any = None
        scaler_class = torch.amp.GradScaler
        wire_dtype = getattr(torch, recipe.wire_dtype) if recipe.wire_dtype else None
        if with_dear:
            import ddp_crossover as dx  # here, so that plain DDP runs without it

            self.state = dx.attach(
                self.ddp,
                self.optimizer,
                fusion_mb=recipe.fusion_mb,
                strict=recipe.strict,
                wire_dtype=wire_dtype,
                schedule=recipe.schedule,
                process_group=_zero_cta_group() if recipe.copy_engines else None,
                **recipe.attached,
            )
            scaler_class = dx.GradScaler if recipe.scaler == "own" else scaler_class
        elif wire_dtype is not None and wire_dtype.is_floating_point:
            self.ddp.register_comm_hook(wire_dtype, cast_hook)
        enabled = bool(recipe.scaler)
        self.scaler = scaler_class(device.type, init_scale=INITIAL_LOSS_SCALE, enabled=enabled)

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, the same whenever they are asked for, different on every rank."""
        generator = torch.Generator().manual_seed(1000 * index + self.rank)
        x, y = torch.randn(16, INPUTS, generator=generator), torch.randn(16, OUTPUTS, generator=generator)
        return x.to(self.device), y.to(self.device)

    def step(self, batches: list[tuple[Tensor, Tensor]], poison: float = 1.0) -> dict[str, Tensor]:
        """One optimizer step; returns what a training script would log."""
        recipe = self.recipe
        for place, (x, y) in enumerate(batches):
            last = place == len(batches) - 1
            with self._counted(len(x)), nullcontext() if last else self.ddp.no_sync():
                with self._autocast():
                    output = self.ddp(x.to(getattr(torch, recipe.dtype)))
                    loss = nn.functional.mse_loss(output.float(), y) * (poison / len(batches))
                self.scaler.scale(loss).backward()
        seen = {"loss": loss.detach()}
        if recipe.clip:
            self.scaler.unscale_(self.optimizer)
            seen["norm"] = self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=recipe.set_to_none)
        return seen

    def _autocast(self) -> Any:
        if not self.recipe.autocast:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.recipe.autocast))

    def _counted(self, samples: int) -> Any:
        return self.state.batch(samples) if self.state is not None and self.recipe.weighted else nullcontext()

    def _clip(self) -> Tensor:
        if self.recipe.clip == "own" and self.state is not None:
            return self.state.clip_grad_norm_(MAX_NORM)
        return nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)

    def train(self) -> dict[str, Any]:
        """Run all steps; returns what a script could log of each, and the state of model and optimizer afterwards."""
        recipe = self.recipe
        seen: dict[str, Any] = {}
        for index in range(recipe.steps):
            batches = [self.batch(index * recipe.accumulate + place) for place in range(recipe.accumulate)]
            poison = float("inf") if index == recipe.poisoned_step else 1.0
            for name, value in self.step(batches, poison).items():
                seen[f"{name} of step {index}"] = value.clone()
            if recipe.scaler:
                seen[f"loss scale after step {index}"] = self.scaler.get_scale()
        # No synchronize(): state dicts must be right without.
        seen["model"] = self.ddp.module.state_dict()
        if self.state is not None and recipe.sharded:
            self.state.consolidate()  # each rank has some of it only
        seen["optimizer"] = self.optimizer.state_dict()
        return _leaves(seen)

    def close(self) -> None:
        if self.state is not None:
            self.state.detach()


def model_values(module: nn.Module) -> dict[str, Tensor]:
    """What a model's state dict holds, on the host, by the paths that :func:`digest` looks for."""
    return {f"model.{name}": value.detach().cpu().clone() for name, value in module.state_dict().items()}


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one dict from path to value; tensors copied to the host."""
    if isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return {k: v for key, item in items for k, v in _leaves(item, f"{path}.{key}".lstrip(".")).items()}
    return {path: value.detach().cpu().clone() if isinstance(value, Tensor) else value}


def difference(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> tuple[float, list[str]]:
    """Largest difference, and the paths of all that is not equal bit for bit (a NaN equals a NaN)."""
    if actual.keys() != expected.keys():
        return float("inf"), sorted(actual.keys() ^ expected.keys())
    largest, paths = 0.0, []
    for path, value in expected.items():
        other = actual[path]
        if not isinstance(value, Tensor):
            if other != value:
                paths.append(f"{path}: {other!r} instead of {value!r}")
            continue
        if other.shape != value.shape or other.dtype != value.dtype:
            return float("inf"), [f"{path}: {other.dtype} {tuple(other.shape)}"]
        unequal = (other != value) & ~(other.isnan() & value.isnan())
        if bool(unequal.any()):
            paths.append(path)
            gap = float((other.double() - value.double()).abs()[unequal].max())
            largest = max(largest, gap if gap == gap else float("inf"))
    return largest, paths


def digest(values: Mapping[str, Any]) -> str:
    """Hash of the parameters, for comparing ranks. Batch statistics are each rank's own."""
    sha = hashlib.sha256()
    for path, value in values.items():
        if path.startswith("model.") and "running_" not in path:
            sha.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
