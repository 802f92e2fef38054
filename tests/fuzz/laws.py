"""What must be equal between an attached run and plain DDP, and what then stands in plain DDP's place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from comparison import leaves

from .features import BRANCHES, OUTSIDE, OUTSIDE_OF_BATCHES, READS_GRADIENTS
from .habits import COMMUNICATING
from .program import Choices, Event, Program


class Law(StrEnum):
    """How an arm is judged. After every program all ranks must have the same parameters, bit for bit."""

    BITS = "bits"  # all that was seen, and the end
    CLOSE = "close"  # the same within rounding: sums in another order, in fp64
    RANKS = "ranks"  # by its own numbers only: finite, and alike on all ranks


CLOSE = {"rtol": 1e-6, "atol": 1e-8}

BUFFERS = ("running_", "num_batches_tracked")

# Optimizers whose updates are proportional to gradients.
_NOT_DIVIDING = ("sgd", "momentum", "nesterov", "asgd")
_NORMS_FROM_SHARDS = ("norm", "loop", "one_norm", "one_layer")


def law_of(script: Choices, arm: Choices) -> Law:
    """The law of an arm."""
    # The limit of a sparse wire, which leaves nothing out, computes what plain DDP does where values are fp32: as that
    # they travel and are added up.
    is_fp32 = script.get("dtype", "float32") == "float32" and script.get("model") != "mixed"
    is_limit = arm.get("top_k") == 1.0 and not arm.get("wire") and is_fp32
    if arm.get("wire") == "int8" or (arm.get("top_k") and not is_limit):
        return Law.RANKS
    takes_other_norms = script.get("clip") == "own" or (
        arm.get("norms") == "sharded" and script.get("clip") in _NORMS_FROM_SHARDS
    )
    # Sums over layers are those of shards.
    sums_shards = bool(arm.get("shard_optimizer")) and script.get("optimizer") in ("lars", "lamb")
    is_weighted = arm.get("weighted") and script.get("sizes", "equal") != "equal"
    # A log of a norm from shards differs in its last bits, the training does not; not worth a law of its own.
    logs_other_norms = arm.get("norms") == "sharded" and script.get("clip") == "log"
    return Law.CLOSE if takes_other_norms or is_weighted or logs_other_norms or sums_shards else Law.BITS


def reference_of(script: Choices, arm: Choices) -> Choices:
    """What plain DDP must do by other means to compute what this arm does."""
    reference: dict[str, Any] = {}
    if arm.get("wire") in ("bfloat16", "float16"):
        reference["wire"] = arm["wire"]
    if arm.get("weighted") and script.get("sizes", "equal") != "equal":
        reference["weighted"] = True
    return reference


def fit(program: Program) -> Program:
    """The program with what its laws need: fp64 where sums are compared within rounding."""
    script, arms = dict(program.script), [dict(arm) for arm in program.arms]
    for arm in arms:
        if arm.get("wire") == "int8" and (arm.get("schedule") == "allreduce" or arm.get("shard_optimizer")):
            arm.pop("wire")  # refused
        # What run does not attach to, as such optimizers, plain DDP sums in its own order, as it is, without weights.
        if arm.get("by_auto") and (script.get("sizes", "equal") != "equal" or program.ranks > 2):
            arm.pop("shard_optimizer", None)
            script.pop("habit", None)
        if arm.get("by_auto") and (arm.get("shard_optimizer") or script.get("habit")):
            arm.pop("wire", None)
    if script.get("sizes") == "zeros":
        for arm in arms:
            arm["weighted"] = True
        # Plain DDP runs a forward on a rank without data, which moves its statistics, or its count of forwards.
        if script.get("model") in ("batch_norm", "wired"):
            script["sizes"] = "unequal"
        script.pop("batch_around", None)  # the last micro-batch, outside of no_sync(), must have samples
        if script.get("second") == "one_optimizer":
            script.pop("micro_batches", None)  # a rank without data takes any sample, beside which .grad must be empty
            script.pop("reduce_each", None)
    if script.get("habit") in COMMUNICATING and script.get("model") in BRANCHES:
        script.pop("past_ddp", None)  # ranks have gradients of other parameters there, so plain DDP's job dies
    if script.get("habit") == "keeps_gradients":
        script.pop("bucket_view", None)  # it keeps views of DDP's buckets, of which attach and detach make others
    if script.get("average") == "own" and script.get("habit") == "averages_in_hook":
        script.pop("average")  # dx.Ema takes in what an update leaves, before the script averages that over ranks
    if script.get("average") == "own":
        script.pop("overflow", None)  # the script averages after a step that the scaler skips, too, dx.Ema does not
    if any(law_of(script, arm) is Law.CLOSE for arm in arms):
        if script.get("model") in ("recurrent", "mixed"):
            script.pop("model")
        if script.get("habit") == "votes":  # a sign may be any
            script.pop("habit")
        # The bias of attention's keys has no gradient but rounding, which an optimizer that divides by it makes large.
        if script.get("model") == "attending" and script.get("optimizer", "sgd") not in _NOT_DIVIDING:
            script["optimizer"] = "momentum"
        script |= {"dtype": "float64"}
        script.pop("autocast", None)
        script.pop("step_in", None)
        for arm in arms:
            if arm.get("wire") in ("bfloat16", "float16"):
                arm.pop("wire")
    if script.get("sizes", "equal") != "equal" and any(arm.get("weighted") for arm in arms):
        script.pop("attach_at", None)  # plain DDP would train the first steps with equal weights
        script.pop("reduce_each", None)  # each reduced backward has weights of its own, and losses would be others
    names = {event.name for event in program.events}
    for arm in arms:
        if "detached" in names and arm.get("wire") in ("bfloat16", "float16"):
            arm.pop("wire")  # plain DDP keeps the hook that stands for it
    _fit_trained(script)
    names_all = {event.name for event in program.events}
    for arm in arms:
        if script.get("habit") == "counts_late":
            arm.pop("shard_optimizer", None)  # slices are no large matrices, and nobody sees that they are not counted
        if arm.get("shard_optimizer") and script.get("local_edits") == "as_data":
            arm["strict"] = True  # else nobody sees them, as the documentation says
        if names_all & {"parameters_read_past_torch", "gradients_read_past_torch"}:
            arm.pop("strict", None)  # which shows NaN
    if script.get("model") in BRANCHES:
        script["find_unused"] = True
    events = tuple(event for event in program.events if not any(_is_refused(event, script, arm) for arm in arms))
    if program.ranks > 2:  # what is left is DDP's own sum, in another order than that of the hook that stands for it
        events = tuple(event for event in events if event.name != "detached")
    is_weighted = any(arm.get("weighted") for arm in arms)
    attaches_late = script.get("attach_at") or any(arm.get("by_auto") for arm in arms)
    if is_weighted or attaches_late or names & {"attached_again", "detached"}:
        # After a change of dtype DDP reduces nothing more, but for a new reducer, which attach and detach make. What is
        # not reduced is not weighted, which is refused.
        events = tuple(event for event in events if event.name != "to_double_and_back")
    unique = [dict(items) for items in dict.fromkeys(tuple(sorted(arm.items())) for arm in arms)]
    return replace(program, script=script, arms=tuple(unique), events=events)


def _fit_trained(script: dict[str, Any]) -> None:
    """What plain DDP needs for parameters that are not always trained."""
    if not script.get("trained"):
        return
    if script.get("static_graph"):
        script["trained"] = "frozen_for_good"
        return
    script["find_unused"] = True
    if script["trained"] == "by_optimizer":
        if script.get("optimizer") not in ("two", "interleaved"):
            script["optimizer"] = "interleaved"
        for name in ("habit", "closure", "second"):
            script.pop(name, None)
        if script.get("average") == "own":
            script.pop("average")  # dx.Ema follows each optimizer's steps, and the script those of all
    if script["trained"] == "each_micro_batch":
        script.setdefault("micro_batches", 2)


def _is_refused(event: Event, script: Choices, arm: Choices) -> bool:
    """Whether the ranks of an arm could not do this, as the documentation says."""
    reads_alone = event.rank is not None and event.name in READS_GRADIENTS and event.place in OUTSIDE
    # The loop goes on with the next batch, where the others wait for as many samples as they were told of.
    skips_a_batch = event.name in ("forward_raises", "loss_raises") and script.get("sizes", "equal") != "equal"
    return bool(
        (arm.get("weighted") and (event.name in OUTSIDE_OF_BATCHES or skips_a_batch))
        or (arm.get("shard_optimizer") and reads_alone)
        # A turn begins in a hook of the module inside of DDP.
        or (arm.get("lease") and event.name == "module_pickled")
    )


def difference(seen: Any, expected: Any, law: Law) -> str:
    """The first thing that differs, in one line; empty if nothing does. A NaN equals a NaN."""
    if law is Law.RANKS:
        return ""
    actual, wanted = dict(leaves(seen)), dict(leaves(expected))
    if actual.keys() != wanted.keys():
        return f"in one arm only: {sorted(actual.keys() ^ wanted.keys())[:4]}"
    tolerance = CLOSE if law is Law.CLOSE else {"rtol": 0.0, "atol": 0.0}
    for path, value in wanted.items():
        other = actual[path]
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            try:
                torch.testing.assert_close(other, value, equal_nan=True, **tolerance)
            except AssertionError as error:
                return f"{path.lstrip('.')}: {' '.join(str(error).split())[:200]}"
        elif other != value and not (other != other and value != value):
            return f"{path.lstrip('.')}: {str(other)[:60]!r} instead of {str(value)[:60]!r}"
    return ""


def digest(final: Mapping[str, Any]) -> str:
    """Of all that must be the same on all ranks. Buffers are each rank's own until the next forward."""
    sha = hashlib.sha256()
    for path, value in leaves({"models": final["models"], "optimizers": final["optimizers"]}):
        if isinstance(value, Tensor) and not any(name in path for name in BUFFERS) and value.numel():
            sha.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def is_finite(final: Mapping[str, Any]) -> bool:
    """Whether all parameters are finite."""
    values = leaves(final["models"])
    return all(bool(value.isfinite().all()) for _, value in values if isinstance(value, Tensor))
