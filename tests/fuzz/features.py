"""The one table of what a program can contain. A new feature of the package is a line here, and meets all others.

A feature has a name, its values (the first is the default, which a shrunk program has), and the choices beside which it
is not drawn, because plain DDP cannot do that or because `attach` refuses it by name (refusals are counted, but teach
little). How often a feature is drawn does not depend on how many values it has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from .habits import HABITS, WITHOUT_HOOKS, WRAPPERS
from .program import Choices

Without = Callable[[Choices], bool]


def has(*features: str, **values: Any) -> Without:
    """Whether one of these features is chosen at all, or has one of these values (a value, or a tuple of some)."""

    def found(choices: Choices) -> bool:
        return any(choices.get(name) for name in features) or any(
            choices.get(name) in (value if isinstance(value, tuple) else (value,)) and name in choices
            for name, value in values.items()
        )

    return found


def never(choices: Choices) -> bool:
    """Goes with everything."""
    return False


class Feature(NamedTuple):
    """One thing that a program can do in several ways.

    Attributes:
        name: of the feature.
        values: the default, then all others.
        without: the choices made before, in the order of the table, beside which it keeps its default.
        often: how much oftener than others it is drawn.
    """

    name: str
    values: tuple[Any, ...]
    without: Without = never
    often: float = 1.0


def either(*conditions: Without) -> Without:
    """Whether one of them holds."""
    return lambda choices: any(condition(choices) for condition in conditions)


def _adds_to_views(choices: Choices) -> bool:
    """Plain DDP leaves views where they are: what is added to another parameter's depends on its bucket."""
    adds_up = choices.get("zero") in ("zeros_before", "zeros_after", "never", "some_steps")
    return adds_up and bool(choices.get("bucket_view"))


def _is_refused_by_some_ranks(choices: Choices) -> bool:
    """A gradient of one rank alone is not recognized where its elements were clipped, and the other ranks raise."""
    return bool(choices.get("weighted")) and choices.get("clip") == "value"


# Whether this version of torch can copy the gradients of a bucket into it together.
BATCHES_COPIES = "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters
# Parameters that take part in some forwards only. DDP must look for them, and no graph is static.
BRANCHES = ("branched", "by_rank")
# What has DDP look for parameters without a gradient: `trained` changes which ones require one.
LOOKS = ("find_unused", "trained")
# What reads gradients. With a sharded optimizer a rank may do that alone before `step()` only.
READS_GRADIENTS = ("gradients_read", "gradient_norm", "gradients_kept", "thread_reads_gradients")
# Forwards with gradients that are no batch, which a state that weights batches refuses.
OUTSIDE_OF_BATCHES = ("forward_unused",)

SCRIPT = (
    Feature(
        "model",
        ("odd", "deep", "matrices", "batch_norm", "dropout", "channels_last", "frozen", "branched", "by_rank", "tied",
         "checkpointed", "recurrent", "attending", "wired", "mixed"),
        often=3,
    ),
    Feature("dtype", ("float32", "float64", "bfloat16"), has(model=("recurrent", "mixed"))),
    Feature("habit", ("", *HABITS), often=1.5),  # of an optimizer, which then is none of the next line
    Feature(
        "optimizer",
        ("sgd", "sgd_fused", "momentum", "nesterov", "adam", "adamw", "amsgrad", "adamw_foreach", "adamw_loop",
         "adamw_fused", "rmsprop", "adagrad", "adagrad_fused", "rprop", "adadelta", "adamax", "nadam", "radam", "asgd",
         "grouped", "two", "interleaved", "partial", "lars", "lamb"),
        has("habit"),
        often=3,
    ),
    Feature("bucket_view", (False, True)),
    Feature("batched_grad_copy", (False, True), lambda choices: not BATCHES_COPIES),
    Feature("find_unused", (False, True)),  # always, with branches
    Feature("static_graph", (False, True), has("find_unused", model=(*BRANCHES, "frozen", "wired"))),
    # With a static graph one set for good: see `laws.fit`.
    Feature("trained", ("", "frozen_for_good", "frozen_before_attach", "frozen_after_attach", "each_step", "layers",
                        "each_micro_batch", "by_optimizer")),
    Feature("broadcast_buffers", (True, False)),
    Feature("small_buckets", (False, True)),
    Feature("micro_batches", (1, 2, 3), often=2),
    Feature("reduce_each", (False, True), lambda choices: choices.get("micro_batches", 1) == 1),
    Feature(
        "zero",
        ("before", "zeros_before", "between", "after", "zeros_after", "by_hand", "by_model", "never", "some_steps"),
        often=2,
    ),
    Feature("clip", ("", "norm", "own", "value", "log", "loop", "one_norm", "one_layer"), often=1.5),
    Feature("scaler", ("", "stock", "own"), has(dtype="bfloat16")),
    Feature("overflow", (False, True),
            lambda choices: not choices.get("scaler") and choices.get("habit") != "skips_non_finite"),
    Feature("autocast", (False, True), has(dtype=("float64", "bfloat16"), model="recurrent")),
    Feature("closure", (False, True), has("scaler", optimizer=("two", "interleaved"), habit="takes_no_closure")),
    Feature("by_name", (False, True)),
    Feature("forwards", (1, 2), has("static_graph", model=BRANCHES)),
    Feature("penalty", ("", "input", "weights"), has("static_graph", "autocast", "scaler", *LOOKS,
                                                     model=(*BRANCHES, "checkpointed", "attending", "recurrent"))),
    Feature("scheduler", ("", "step", "cycle", "one_cycle")),
    Feature("sizes", ("equal", "unequal", "zeros"), has(*LOOKS, "static_graph", model=BRANCHES, zero="between")),
    # In each micro-batch, most of whose gradients are a rank's own, and not weighted yet; or when the step is done.
    Feature("clip_when", ("", "each", "late"), lambda choices: not choices.get("clip") or "sizes" in choices),
    Feature("past_ddp", ("", "always", "sometimes"),  # forwards through the module inside of DDP, which reduces nothing
            either(has("static_graph", "by_name", clip="own", sizes="zeros"), _is_refused_by_some_ranks)),
    Feature("batch_around", ("each", "all"), lambda choices: choices.get("micro_batches", 1) == 1),
    Feature("second", ("", "alternate", "one_optimizer"),
            has("closure", "scaler", "static_graph", optimizer=("two", "interleaved", "partial"))),
    Feature("average", ("", "stock", "own", "by_hand")),
    Feature("after_update", (False, True)),
    Feature("hooks", ("", "tensor", "accumulated", "module"), has(model="recurrent")),
    # Ranks that run other hooks than others go apart.
    Feature("hooks_write", (False, True), has(model=("recurrent", "by_rank"), sizes="zeros")),
    Feature("mode", ("", "device", "function")),
    Feature("step_in", ("", "autocast", "fp64", "inference_mode", "function_mode"), has("closure", "scaler")),
    # Right after an attach in the middle of training, a backward past DDP is taken for that of a forward before it.
    Feature("attach_at", (0, 3), has("weighted", "past_ddp", sizes="zeros")),
    Feature("dropped", (False, True)),
    Feature("collects_garbage", (False, True)),
    # A rank's own, of some parameters, which ranks average after the step.
    Feature("local_edits", ("", "before_forward", "before_step", "as_data")),
    Feature("one_rank_evaluates", (False, True)),
    # What others have in the process: half of all programs.
    Feature("beside", ("", "thread", "handler", "both"), often=3),
)  # fmt: skip

ARM = (
    Feature("fusion_mb", (5e-4, 1e-4, 1.0), often=1.5),
    Feature("schedule", ("auto", "dear", "allreduce")),
    Feature("strict", (False, True)),
    Feature("norms", ("exact", "sharded"), has("past_ddp"), often=1.5),  # takes what is not reduced for shared
    Feature("shard_optimizer", (False, True), has(schedule="allreduce"), often=2),
    Feature("weighted", (False, True), has(habit=WITHOUT_HOOKS)),  # refused
    Feature("wire", ("", "bfloat16", "float16", "int8")),  # codes and shards: see `laws.fit`
    Feature("top_k", (0, 0.3, 1.0), has("shard_optimizer", schedule="allreduce")),
    Feature("groups", ("", "node"), has("shard_optimizer", schedule="allreduce")),
    Feature("plans", ("", "random"), has("top_k", "groups", wire="int8")),
    Feature("connections", (1, 3)),
    Feature("own_group", (False, True)),
    # As `run` does: a script that has no state in its hands.
    Feature("by_auto", (False, True), has("weighted", "own_group", "after_update", average="own"), often=2),
    Feature("lease", (False, True), has("by_auto")),  # beside another job on the device
    Feature("trace", (False, True), has(habit=WITHOUT_HOOKS)),  # refused
)

STEPS = 9
"""So many steps has a program; the pipeline begins in the third or fourth."""
TUNED_STEPS = 140
"""So many steps has a program whose arms find their plans by themselves."""


class EventFeature(NamedTuple):
    """Something that happens once.

    Attributes:
        name: in `events.EVENTS`.
        places: where it may happen, see `program.Event`.
        without: beside which choices of the script it is not drawn.
        by_one: whether one rank alone may do it.
    """

    name: str
    places: tuple[str, ...] = ("begin", "gradients", "clipped", "stepped")
    without: Without = never
    by_one: bool = False


OUTSIDE = ("begin", "stepped")
CHANGES_GRAPH = has("static_graph")
NOT_IN_TRANSFORMS = has(model=(*BRANCHES, "batch_norm", "dropout", "checkpointed", "attending", "recurrent"))
EVENTS = (
    EventFeature("evaluate", by_one=True),
    EventFeature("evaluate_ddp", without=has(model=BRANCHES)),
    EventFeature("evaluate_inference", by_one=True),
    EventFeature("layer_called", by_one=True),
    EventFeature("forward_without_grad", by_one=True, without=has(model="batch_norm")),
    EventFeature("forward_unused", OUTSIDE, either(CHANGES_GRAPH, has(*LOOKS, model=(*BRANCHES, "batch_norm")))),
    EventFeature("state_dict", by_one=True),
    EventFeature("state_dict_of_layer", by_one=True),
    EventFeature("load_state_dict", OUTSIDE),
    EventFeature("optimizer_state_dict"),
    EventFeature("optimizer_resumes", OUTSIDE),
    EventFeature("optimizer_state_read"),
    EventFeature("optimizer_state_edited", OUTSIDE),
    EventFeature("optimizer_copied", without=has(habit=WRAPPERS)),  # torch copies no wrapper
    EventFeature("optimizer_pickled", without=has(habit=(*WRAPPERS, "averages_in_hook"))),
    EventFeature("gradients_read", by_one=True),
    EventFeature("gradient_norm", by_one=True),
    EventFeature("gradients_halved"),
    EventFeature("gradients_replaced"),
    EventFeature("gradient_dropped"),
    EventFeature("second_backward", ("gradients",), has("static_graph", model=(*BRANCHES, "batch_norm", "dropout"))),
    EventFeature("gradients_kept", by_one=True),
    EventFeature("gradients_taken", without=_adds_to_views),
    EventFeature("parameters_read", by_one=True),
    EventFeature("parameters_read_past_torch", by_one=True),
    EventFeature("gradients_read_past_torch"),
    EventFeature("parameters_clamped", OUTSIDE),
    EventFeature("parameters_copied_into", OUTSIDE),
    EventFeature("parameters_scaled_as_data", OUTSIDE),
    EventFeature("parameters_kept_as_data", by_one=True),
    EventFeature("parameters_as_vector", OUTSIDE),
    EventFeature("memory_replaced", OUTSIDE),
    EventFeature("learning_rate"),
    EventFeature("weight_decay"),
    EventFeature("group_added", OUTSIDE, has("scheduler")),  # schedulers of torch refuse a group that comes later
    EventFeature("frozen", OUTSIDE, either(CHANGES_GRAPH, lambda choices: not choices.get("find_unused"))),
    EventFeature("thawed", OUTSIDE, either(CHANGES_GRAPH, lambda choices: not choices.get("find_unused"))),
    EventFeature("attached_again", OUTSIDE, has("past_ddp")),
    EventFeature("detached", OUTSIDE, has(sizes="zeros")),
    EventFeature("synchronized"),
    EventFeature("module_copied", by_one=True),
    EventFeature("module_pickled", by_one=True, without=has(model="wired")),  # torch pickles no parametrization
    EventFeature("forward_raises", ("begin",), has("closure")),
    EventFeature("loss_raises", ("begin",), either(has("closure", "scaler"), CHANGES_GRAPH)),
    EventFeature("step_raises", ("gradients",), has("closure", "scaler")),
    EventFeature("step_skipped", ("gradients",), has("closure", "scaler", average="own")),
    EventFeature("step_twice", ("gradients",), has("closure", "scaler", average="own")),  # dx.Ema averages after each
    EventFeature("thread_reads", by_one=True),
    EventFeature("thread_reads_gradients", ("gradients",), by_one=True),
    EventFeature("functional_call", by_one=True, without=has(model=("batch_norm", "dropout", "checkpointed"))),
    EventFeature("func_grad", OUTSIDE, NOT_IN_TRANSFORMS),
    EventFeature("func_grad_of_input", OUTSIDE, NOT_IN_TRANSFORMS),
    EventFeature("autograd_grad", OUTSIDE, has("static_graph", model=("batch_norm", "by_rank"))),
    EventFeature("micro_batch_dropped", OUTSIDE, has("static_graph", model=BRANCHES)),
    EventFeature("random_numbers", by_one=False),
    EventFeature("garbage", by_one=True),
    EventFeature("group_made"),
    EventFeature("all_reduced"),
    EventFeature("train_and_eval", OUTSIDE),
    EventFeature("to_double_and_back", OUTSIDE, has(model="mixed")),
    EventFeature("figures_read", by_one=True),
    EventFeature("wire_state_saved", OUTSIDE),
)  # fmt: skip
