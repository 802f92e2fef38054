"""The parts `exact`, `streams` and `two-ranks`: the bits of plain DDP, and a host that waits for nothing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ddp_crossover as dx
from bench_kit.ranks import Launch
from gpu_check_parts import checks, two_ranks
from gpu_check_parts.case import Case, one_rank, two_ranks_over_gloo
from gpu_check_parts.runner import Runner
from gpu_check_parts.training import Recipe

ADAMW = {"lr": 0.01}
SGD = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
SHARDED_NORMS = {"norms": "sharded"}
SHARDED = {"shard_optimizer": True}
# Groups of one large matrix each.
WIDE: dict[str, Any] = {"model": "wide", "fusion_mb": 4.0, "steps": 8}


def run_exact(runner: Runner) -> None:
    """World size 1."""
    runner.run_all(equivalence_cases(runner.device))


def run_streams(runner: Runner) -> None:
    """World size 1: what runs when."""
    runner.run_all(no_host_sync_cases(runner.device))
    runner.run_all(stream_cases(runner.device))


def run_two_ranks(runner: Runner) -> None:
    """Two ranks over gloo, then over NCCL where that is possible."""
    device = runner.device
    runner.run_all(two_rank_cases(device, two_ranks_over_gloo(device), "two ranks, gloo"))
    two_ranks.run_over_nccl(runner, lambda launch: over_nccl_cases(device, launch))


def core_recipes(device: str) -> Iterator[tuple[str, Recipe]]:
    """The core of the equivalence matrix."""
    yield "SGD", Recipe()
    yield "SGD momentum nesterov weight decay", Recipe(options=SGD)
    yield "SGD, gradients apart from buckets", Recipe(options=SGD, bucket_view=False)
    yield "Adam", Recipe("Adam", ADAMW)
    yield "AdamW", Recipe("AdamW", ADAMW)
    yield "AdamW foreach", Recipe("AdamW", ADAMW | {"foreach": True})
    yield "AdamW one by one", Recipe("AdamW", ADAMW | {"foreach": False, "capturable": False})
    yield "AdamW fused", Recipe("AdamW", ADAMW | {"fused": True})
    if device != "cpu":  # torch refuses it there
        yield "AdamW capturable", Recipe("AdamW", ADAMW | {"capturable": True})
    yield "AdamW, gradients apart from buckets", Recipe("AdamW", ADAMW, bucket_view=False)
    yield "AdamW strict", Recipe("AdamW", ADAMW, strict=True)
    yield "AdamW fused strict", Recipe("AdamW", ADAMW | {"fused": True}, strict=True)
    yield "convolutions, batch norm, channels last", Recipe("AdamW", ADAMW, model="conv")
    yield "bf16 parameters", Recipe("AdamW", ADAMW, dtype="bfloat16")
    yield "autocast bf16", Recipe("AdamW", ADAMW, autocast="bfloat16")
    yield "zero_grad(set_to_none=False)", Recipe("AdamW", ADAMW, set_to_none=False)
    yield (
        "zero_grad(set_to_none=False), gradients apart",
        Recipe("AdamW", ADAMW, set_to_none=False, bucket_view=False),
    )
    yield "no_sync accumulation", Recipe("AdamW", ADAMW, accumulate=3)
    yield "no_sync accumulation, gradients apart", Recipe(options=SGD, accumulate=3, bucket_view=False)
    yield "bf16 on the wire", Recipe("AdamW", ADAMW, wire_dtype="bfloat16")
    yield "bf16 on the wire, stock clipping", Recipe("AdamW", ADAMW, wire_dtype="bfloat16", clip="stock")
    yield "stock clipping", Recipe("AdamW", ADAMW, clip="stock")
    yield "own clipping", Recipe("SGD", SGD, clip="own")
    for scaler in ("stock", "own"):
        scaled: dict[str, Any] = {"scaler": scaler, "poisoned_step": 9, "autocast": "float16"}
        yield f"fp16, {scaler} GradScaler, a skipped step", Recipe("AdamW", ADAMW, **scaled)
        yield f"fp16, {scaler} GradScaler, fused", Recipe("AdamW", ADAMW | {"fused": True}, **scaled)
    yield (
        "fp16, own GradScaler and own clipping",
        Recipe("SGD", SGD, scaler="own", poisoned_step=9, autocast="float16", clip="own"),
    )


def equivalence_cases(device: str) -> Iterator[Case]:
    """The bits of plain DDP."""
    launch = one_rank(device)
    for name, recipe in core_recipes(device):
        yield Case("equivalence", name, checks.equivalence, (recipe,), launch)
    bound = one_rank(device, bind_device=True)
    yield Case(
        "equivalence", "AdamW, device_id bound", checks.equivalence, (Recipe("AdamW", ADAMW),), bound, needs_cuda=True
    )


def no_host_sync_cases(device: str) -> Iterator[Case]:
    """The host waits nowhere in a steady step."""
    launch = one_rank(device)
    steady = {
        "SGD": Recipe(options=SGD),
        "AdamW": Recipe("AdamW", ADAMW),
        "AdamW fused": Recipe("AdamW", ADAMW | {"fused": True}),
        "no_sync accumulation": Recipe("AdamW", ADAMW, accumulate=2),
        "bf16 on the wire": Recipe("AdamW", ADAMW, wire_dtype="bfloat16"),
        "stock clipping": Recipe("AdamW", ADAMW, clip="stock"),
        "own clipping": Recipe("AdamW", ADAMW, clip="own"),
        "own GradScaler, fused": Recipe("AdamW", ADAMW | {"fused": True}, scaler="own", autocast="float16"),
        "stock clipping, norms of shards": Recipe("AdamW", ADAMW, clip="stock", attached=SHARDED_NORMS),
        "weighted batches": Recipe("AdamW", ADAMW, attached={"weighted": True}),
    }
    for name, recipe in steady.items():
        # Few groups: the driver itself blocks the host once about a thousand kernels are waiting.
        few_groups = replace(recipe, fusion_mb=0.05)
        yield Case("no host sync", name, checks.no_host_sync, (few_groups,), launch, alone=True, needs_cuda=True)


def stream_cases(device: str) -> Iterator[Case]:
    """Every stream waits for what it reads; the controls take one such wait out."""
    launch, group = one_rank(device), "streams"
    sgd, adamw = Recipe(options=SGD, **WIDE), Recipe("AdamW", {"lr": 0.001}, **WIDE)
    late = checks.equivalence_with_late_legs
    recipes = {
        "late gradients, late legs": adamw,
        "late legs, gradients apart from buckets": Recipe(options=SGD, bucket_view=False, **WIDE),
        "late legs, stock clipping": Recipe(options=SGD, clip="stock", **WIDE),
        "late legs, own clipping": Recipe(options=SGD, clip="own", **WIDE),
        "late legs, branches on two streams": Recipe(options=SGD, model="branches", fusion_mb=1.0, steps=8),
        "late legs, parameters shared by two streams": Recipe(options=SGD, model="shared", fusion_mb=1.0, steps=8),
        "late legs, accumulation": Recipe(options=SGD, accumulate=2, **WIDE),
    }
    for name, recipe in recipes.items():
        yield Case(group, name, late, (checks.on(recipe, device),), launch, alone=True)
    side = checks.equivalence_on_side_stream
    yield Case(group, "training on a side stream", side, (adamw,), launch, alone=True, needs_cuda=True)
    for missing in ("without_wait_for_legs", "without_wait_for_gradients"):
        yield Case(
            group,
            f"control: {missing.replace('_', ' ')}",
            checks.missing_wait_is_noticed,
            (sgd, missing),
            launch,
            alone=True,
            needs_cuda=True,
        )


def two_rank_cases(device: str, launch: Launch, group: str) -> Iterator[Case]:
    """World size 2, on a launch that has been tried."""
    recipes = {
        "SGD momentum nesterov weight decay": Recipe(options=SGD),
        "AdamW, gradients apart from buckets": Recipe("AdamW", ADAMW, bucket_view=False),
        "AdamW fused strict": Recipe("AdamW", ADAMW | {"fused": True}, strict=True),
        "convolutions, batch norm, channels last": Recipe("AdamW", ADAMW, model="conv"),
        "no_sync accumulation": Recipe("AdamW", ADAMW, accumulate=3),
        "bf16 on the wire": Recipe("AdamW", ADAMW, wire_dtype="bfloat16"),
        "fp16 on the wire, own GradScaler, a skipped step": Recipe(
            "AdamW", ADAMW, scaler="own", poisoned_step=9, wire_dtype="float16"
        ),
        "stock clipping": Recipe("AdamW", ADAMW, clip="stock"),
        "own clipping": Recipe("SGD", SGD, clip="own"),
        "fp16, own GradScaler, a skipped step": Recipe(
            "AdamW", ADAMW, scaler="own", poisoned_step=9, autocast="float16"
        ),
        "norms of shards, stock clipping": Recipe("SGD", SGD, clip="stock", attached=SHARDED_NORMS),
        "sharded optimizer": Recipe("AdamW", ADAMW, attached=SHARDED),
        "sharded optimizer, norms of shards, stock clipping": Recipe(
            "SGD", SGD, clip="stock", attached=SHARDED | SHARDED_NORMS
        ),
        "weighted batches": Recipe("AdamW", ADAMW, attached={"weighted": True}),
    }
    for name, recipe in recipes.items():
        if recipe.sharded and launch.backend == "gloo" and device != "cpu":
            continue  # refused: gloo sends CUDA gradients through the host
        yield Case(group, name, checks.equivalence, (recipe,), launch, alone=True)
    late = checks.on(Recipe("AdamW", {"lr": 0.001}, **WIDE), device)
    yield Case(group, "late gradients, late legs", checks.equivalence_with_late_legs, (late,), launch, alone=True)
    yield Case(group, "a dropped model", checks.dropped_model, (Recipe(options=SGD),), launch, alone=True)


def over_nccl_cases(device: str, launch: Launch) -> Iterator[Case]:
    """The same, what only NCCL has, and that the host waits for nothing there."""
    group = "two ranks, NCCL"
    yield from two_rank_cases(device, launch, group)
    int8 = Recipe("AdamW", ADAMW, wire_dtype="int8")
    top_k = Recipe("AdamW", ADAMW, attached={"compress": dx.TopK(0.1)})
    yield Case(group, "int8 on the wire", checks.codes_train_alike, (int8,), launch, alone=True)
    yield Case(group, "top-k on the wire", checks.codes_train_alike, (top_k,), launch, alone=True)
    yield Case(group, "local steps", checks.relaxed_ranks_meet, (Recipe("AdamW", ADAMW), 6), launch, alone=True)
    steady = {
        "AdamW": Recipe("AdamW", ADAMW),
        "own clipping": Recipe("AdamW", ADAMW, clip="own"),
        "norms of shards, stock clipping": Recipe("AdamW", ADAMW, clip="stock", attached=SHARDED_NORMS),
        "sharded optimizer": Recipe("AdamW", ADAMW, attached=SHARDED),
        "sharded optimizer, norms of shards, stock clipping": Recipe(
            "AdamW", ADAMW, clip="stock", attached=SHARDED | SHARDED_NORMS
        ),
        "sharded optimizer, bf16 on the wire": Recipe("AdamW", ADAMW, wire_dtype="bfloat16", attached=SHARDED),
        "sharded LARS": Recipe("LARS", {"lr": 0.1}, attached=SHARDED),
        "sharded LAMB": Recipe("LAMB", {"lr": 0.01}, attached=SHARDED),
        "int8 on the wire": int8,
        "top-k on the wire": top_k,
        "weighted batches": Recipe("AdamW", ADAMW, attached={"weighted": True}),
    }
    for name, recipe in steady.items():
        few_groups = replace(recipe, fusion_mb=0.05)
        yield Case("no host sync, NCCL", name, checks.no_host_sync, (few_groups,), launch, alone=True, needs_cuda=True)
