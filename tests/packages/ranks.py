"""What runs on each rank: one configuration by plain DDP and in each mode, and what differs between them."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import re
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from comparison import first_difference

from .building import build
from .listed import Configuration
from .nets import Shapes, batch

STEPS = 16
GROUP_MB = 0.03  # the largest matrix is a group of its own, others hold several parameters
AT_ATTACH = "at attach"
PLAIN = "plain"
"""A mode of its own: whether plain DDP trains at all."""
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "shards": {"shard_optimizer": True},
    "scheduled": {},  # a new learning rate in each step
    "scheduled shards": {"shard_optimizer": True},
}
# Until DDP has built its buckets anew, every step is a plain all-reduce; and a few may be watched.
LEAST_DEFERRED = STEPS // 2


class Verdict(NamedTuple):
    """How a mode of a configuration ended on one rank.

    Attributes:
        kind: a kind of `report.KINDS`.
        detail: the reason, what differs, or the error.
        deferred: of how many steps the update was deferred.
    """

    kind: str
    detail: str = ""
    deferred: int = 0


class _Arm(NamedTuple):
    losses: list[Any]
    final: dict[str, Any]
    error: str = ""
    step: int = -1
    fallbacks: Mapping[str, int] = {}
    deferred: int = 0


def judge(configuration: Configuration, modes: tuple[str, ...], site: str) -> dict[str, Verdict]:
    """Train on this rank: a verdict for each mode.

    Args:
        configuration: what to train.
        modes: of `MODES`.
        site: a folder with packages, looked at after those of the environment.
    """
    if site and site not in sys.path:
        sys.path.append(site)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    configuration = Configuration(*configuration)  # it came as a plain tuple
    plain = {scheduled: None for scheduled in (False, True)}
    verdicts = {}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for mode in modes:
            scheduled = mode.startswith("scheduled")
            if plain[scheduled] is None:
                plain[scheduled] = _train(configuration, None, scheduled)
            verdicts[mode] = _verdict(configuration, mode, scheduled, plain[scheduled])
            if verdicts[mode].kind in ("crash", "plain fails"):
                break
    return verdicts


def _verdict(configuration: Configuration, mode: str, scheduled: bool, plain: _Arm) -> Verdict:
    if plain.error:
        return Verdict("plain fails", _last_line(plain.error))
    if mode == PLAIN:
        return Verdict(PLAIN)
    arm = _train(configuration, MODES[mode], scheduled)
    if arm.error:
        when = AT_ATTACH if arm.step < 0 else f"at step {arm.step}"
        if _is_refusal(arm):
            return Verdict("refused", f"{_last_line(arm.error)} [{when}]")
        return Verdict("crash", f"{when}: {arm.error}")
    found = first_difference(arm.losses, plain.losses) or first_difference(arm.final, plain.final)
    if found:
        again = _train(configuration, None, scheduled)
        repeats = not (first_difference(again.losses, plain.losses) or first_difference(again.final, plain.final))
        return Verdict("wrong" if repeats else "plain does not repeat", found, arm.deferred)
    if arm.deferred >= LEAST_DEFERRED:
        return Verdict("deferred", _reasons(arm), arm.deferred)
    return Verdict("waits", _reasons(arm), arm.deferred)


def _reasons(arm: _Arm) -> str:
    return "; ".join(reason for reason, _ in sorted(arm.fallbacks.items(), key=lambda item: -item[1]))


def _last_line(error: str) -> str:
    lines = [
        line for line in error.strip().splitlines() if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Warning)\b", line)
    ]
    return (lines or error.strip().splitlines() or ["?"])[-1]


def _is_refusal(arm: _Arm) -> bool:
    """Whether the package itself raised it: at attach, or later with the way out."""
    last_file = re.findall(r'File "([^"]+)"', arm.error)[-1]
    names = (
        r"(ValueError|TypeError|[\w.]*DisagreementError)"
        if arm.step < 0
        else r"(ValueError|RuntimeError|[\w.]*UnforeseenError): .*(shard_optimizer|attach)"
    )
    return "/ddp_crossover/" in last_file and re.match(names, _last_line(arm.error)) is not None


def _train(configuration: Configuration, options: dict[str, Any] | None, scheduled: bool) -> _Arm:
    step = -1
    try:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        net = Shapes()
        ddp = DistributedDataParallel(net)
        optimizer = build(configuration, net)
        loop = configuration.loop
        if loop == "train":
            optimizer.train()
        state = None if options is None else dx.attach(ddp, optimizer, fusion_mb=GROUP_MB, **options)
        if loop == "train_late":
            optimizer.train()
        losses = []
        for step in range(STEPS):
            if scheduled:
                _schedule(optimizer, step)
            losses.append(_step(ddp, optimizer, loop, step))
        return _finished(net, optimizer, state, losses)
    except Exception:
        return _Arm([], {}, traceback.format_exc(), step)
    finally:
        torch.set_grad_enabled(True)


def _finished(net: Shapes, optimizer: Any, state: Any, losses: list[Any]) -> _Arm:
    if state is not None:
        state.consolidate()
    final = {
        "model": _values(dict(net.named_parameters())),
        "gradients": _values({name: p.grad for name, p in net.named_parameters()}),
        "optimizer": _optimizer_state(optimizer),
        "random": torch.get_rng_state(),
    }
    if state is None:
        return _Arm(losses, final)
    stats = state.stats()
    state.detach()
    return _Arm(losses, final, "", STEPS, dict(stats.fallbacks), stats.deferred_steps)


def _schedule(optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float):
            group["lr"] *= 1.1 if step < 5 else 0.95


def _step(ddp: DistributedDataParallel, optimizer: Any, loop: str, step: int) -> Tensor:
    tokens, image, target = batch(step, dist.get_rank())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(ddp(tokens, image), target)
        loss.backward()
        return loss

    if loop == "closure":
        return torch.as_tensor(optimizer.step(closure)).detach().clone()
    with torch.enable_grad():
        loss = closure()
    if loop == "sam":
        optimizer.first_step(zero_grad=True)
        closure()
        optimizer.second_step(zero_grad=True)
    else:
        optimizer.step()
    return loss.detach().clone()


def _optimizer_state(optimizer: Any) -> Any:
    try:
        return _values(optimizer.state_dict())
    except Exception as error:  # as some wrappers do, also without us
        return f"state_dict raises {type(error).__name__}"


def _values(value: Any, depth: int = 0) -> Any:
    """Copies in plain tensors, numbers and words, of all that repeats from run to run."""
    if isinstance(value, Tensor):
        if type(value) is not Tensor and hasattr(value, "__tensor_flatten__"):
            return {name: _values(getattr(value, name)) for name in value.__tensor_flatten__()[0]}
        return value.detach().to_dense().clone().as_subclass(Tensor).requires_grad_(False)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    if isinstance(value, Mapping):
        return {str(key): _values(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_values(item, depth + 1) for item in value]
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if hasattr(value, "__dict__") and depth < 8 and not callable(value):
        return {"class": type(value).__name__, **_values(vars(value), depth + 1)}
    return type(value).__name__
