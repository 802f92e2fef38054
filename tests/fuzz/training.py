"""Runs a program in one arm, plain or attached, as its script would, and keeps what the script could see."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode

from comparison import snapshot
from ddp_crossover.torch_internals.optimizers import move_to_front
from models import INPUTS, OUTPUTS
from reference import rank_order_hook, wire_dtype_hook

from . import optimizers
from .events import EVENTS
from .features import BATCHES_COPIES
from .neighbour import shared_device
from .nets import NETS
from .program import Choices, Event, Program

MAX_NORM = 0.2
LOSS_SCALE = 2.0**8
DECAY = 0.9
# What is frozen at the beginning is trained from this step on.
THAWED_AT = 5
# A rank whose script has no data this time still has so many samples in memory.
SAMPLES = 4


class Boom(Exception):
    """What a script raises by itself, and catches."""


class PassingMode(TorchFunctionMode):
    """A user's own mode, which changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Part:
    """One DDP model of a script, with its optimizers and, where it is attached, its state."""

    def __init__(self, run: Run, name: str, optimizer: str) -> None:
        script = run.script
        self.net = NETS[name]()
        if "dtype" in script:
            self.net.to(getattr(torch, script["dtype"]))
        self.ddp = DistributedDataParallel(
            self.net,
            gradient_as_bucket_view=script.get("bucket_view", False),
            find_unused_parameters=script.get("find_unused", False),
            static_graph=script.get("static_graph", False),
            broadcast_buffers=script.get("broadcast_buffers", True),
            **({"bucket_cap_mb": 5e-4} if script.get("small_buckets") else {}),
            **({"batched_grad_copy": True} if BATCHES_COPIES and script.get("batched_grad_copy") else {}),
        )
        self.optimizers = optimizers.make(optimizer, self.net.parameters()) if optimizer else []
        self.state: Any = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the model."""
        return list(self.net.parameters())


def begin_beside(what: str, stack: contextlib.ExitStack) -> None:
    """Start what others may have in the process: a thread that waits, signal handlers that do nothing."""
    if what in ("thread", "both"):
        ends = threading.Event()
        threading.Thread(target=ends.wait, daemon=True).start()
        stack.callback(ends.set)
    if what in ("handler", "both"):
        for number in (signal.SIGUSR1, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))


def attach_in_first_forward(
    part: Part, options: dict[str, Any], planned: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    """Have the package attach by itself, as under `run`."""
    from ddp_crossover.addons.launch.auto import Auto
    from ddp_crossover.addons.launch.watch import watch_model

    auto = Auto(**options)

    def before_forward(ddp: DistributedDataParallel) -> bool:
        with planned():
            waits = auto.before_forward(ddp)
        part.state = auto.states[0] if auto.states else None
        return waits

    watch_model(part.ddp, before_forward)


class Run:
    """One arm of a program on this rank.

    Args:
        program: the program.
        arm: what `attach` is given; None for plain DDP.
        reference: for plain DDP, the arm that it is compared with: it does by other means what that arm's options
            change in the numbers on purpose (16 bits on the wire, weights of ranks).
    """

    def __init__(self, program: Program, arm: Choices | None, reference: Choices) -> None:
        self.program, self.arm, self.script = program, arm, program.script
        self.reference = reference
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.draw = random.Random(program.seed)  # the same draws in all arms and on all ranks
        self.seen: list[Any] = []
        self.raises = ""
        self.awaits_backward = False  # a loss has raised after its forward
        self.skips = False
        self.kept: list[Any] = []
        self.batches = 0
        self.was_attached = False
        torch.manual_seed(program.seed)
        script = self.script
        self.main = Part(self, script.get("model", "odd"), script.get("habit") or script.get("optimizer", "sgd"))
        self.parts = [self.main]
        self.trainable = [p for p in self.main.parameters if p.requires_grad]  # DDP reduces these
        self._beside = contextlib.ExitStack()
        self._lease: Any = None
        begin_beside(script.get("beside", ""), self._beside)
        self.events: dict[tuple[int, str], list[Event]] = {}
        for event in program.events:
            self.events.setdefault((event.step, event.place), []).append(event)

    # What a script is made of.

    def train(self) -> list[Any]:
        """Run the script; returns all that it looked at, in order."""
        script = self.script
        second = script.get("second", "")
        if second:
            self.parts.append(Part(self, "odd", "momentum" if second == "alternate" else ""))
        if second == "one_optimizer":
            (optimizer,) = self.main.optimizers
            optimizer.add_param_group({"params": self.parts[1].parameters, "lr": 0.03})
            self.parts[1].optimizers = self.main.optimizers
        with self._mode(), self._small_exchanges():
            self._prepare()
            self._choose_trained("prepared")
            for step in range(self.program.steps):
                if step == script.get("attach_at", 0):
                    self.attach()
                    self._choose_trained("attached")
                with self._traced(step):
                    self._step(step)
        return self.seen

    def close(self) -> None:
        """End what the script has beside its training."""
        self._beside.close()

    def _prepare(self) -> None:
        script, optimizer = self.script, self.main.optimizers[0]
        scaler_class: Any = torch.amp.GradScaler
        self.is_scaled = bool(script.get("scaler"))
        if script.get("scaler") == "own" and self.arm is not None:
            import ddp_crossover as dx

            scaler_class = dx.GradScaler
        self.scaler = scaler_class("cpu", init_scale=LOSS_SCALE, growth_interval=3, enabled=self.is_scaled)
        schedule = script.get("scheduler", "")
        self.scheduler: Any = None
        if schedule == "step":
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
        elif schedule == "cycle":
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step % 3))
        elif schedule == "one_cycle":
            moves_momentum = bool({"momentum", "betas"} & optimizer.defaults.keys())
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.05, self.program.steps + 1, cycle_momentum=moves_momentum
            )
        if script.get("hooks") == "tensor":
            self.main.parameters[0].register_hook(lambda grad: grad * 0.5)
        elif script.get("hooks") == "accumulated":
            for parameter in self.main.parameters[:2]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._see_accumulated)
        elif script.get("hooks") == "module":
            next(self.main.net.children()).register_forward_hook(lambda module, args, output: output * 1.0)
        if script.get("hooks_write"):
            for parameter in self.main.parameters:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._decay)
        self.average: Any = None
        if script.get("average") in ("stock", "own"):
            self.average = AveragedModel(self.main.net, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        elif script.get("average") == "by_hand":
            self.average = [p.detach().clone() for p in self.main.parameters]

    def _see_accumulated(self, parameter: Tensor) -> None:
        if self.script.get("sizes", "equal") == "equal":  # else weights multiply what a rank has by itself
            self.see(parameter.grad)

    @staticmethod
    def _decay(parameter: Tensor) -> None:
        parameter.data.mul_(0.99)

    def attach(self) -> None:
        """Where the script has its line `dx.attach(...)`."""
        for part in self.parts:
            if self.arm is None:
                self._plain(part)
                continue
            import ddp_crossover as dx

            if self.arm.get("by_auto") and not self.was_attached:
                attach_in_first_forward(part, self._options(), self._planned)
                continue
            only = part.optimizers[0] if len(part.optimizers) == 1 else part.optimizers
            with self._planned():
                part.state = dx.attach(part.ddp, only, **self._options())
        self.was_attached = True
        if self.arm is None:
            if self.script.get("after_update"):
                for optimizer in self.main.optimizers:
                    # Right after the update: before what the script does after each step.
                    move_to_front(optimizer, optimizer.register_step_post_hook(self._clamp_as_attached))
            return
        import ddp_crossover as dx

        if self.script.get("after_update"):
            self.main.state.after_update(self._clamp)
        if self.script.get("average") == "own":
            saved = None if self.average is None else self.average.state_dict()
            self.average = dx.Ema(self.main.state, DECAY)
            if saved is not None:
                self.average.load_state_dict(saved)

    @staticmethod
    @torch.no_grad()
    def _clamp(parameters: list[Tensor]) -> None:
        for parameter in parameters:
            parameter.clamp_(-0.4, 0.4)

    def _clamp_as_attached(self, optimizer: Optimizer, *_: Any) -> None:
        others = {id(parameter) for part in self.parts[1:] for parameter in part.parameters}
        self._clamp([p for group in optimizer.param_groups for p in group["params"] if id(p) not in others])

    def _options(self) -> dict[str, Any]:
        assert self.arm is not None
        arm = dict(self.arm)
        import ddp_crossover as dx
        from ddp_crossover.comm import gloo_messages

        gloo_messages.LEAST_PART_BYTES = 64  # these models are small

        wire, top_k = arm.pop("wire", ""), arm.pop("top_k", 0)
        options: dict[str, Any] = {"fusion_mb": arm.pop("fusion_mb", 5e-4)}
        if arm.pop("tuned", False):
            options["fusion_mb"] = None
        if wire:
            options["wire_dtype"] = getattr(torch, wire)
        if top_k:
            options["compress"] = dx.TopK(density=top_k)
        if arm.pop("own_group", False):
            options["process_group"] = dist.new_group()
        if arm.pop("lease", False):
            options["lease"] = self._lease = self._lease or self._beside.enter_context(shared_device())
        for name in ("trace", "plans", "by_auto"):
            arm.pop(name, None)
        return options | arm

    def _small_exchanges(self) -> contextlib.AbstractContextManager[Any]:
        """Ranks with shards exchange little at a time, so that several parts meet."""
        if self.arm is None:
            return contextlib.nullcontext()
        from ddp_crossover.addons.shards import between_ranks

        return mock.patch.object(between_ranks, "EXCHANGE_BYTES", 200)

    def _planned(self) -> contextlib.AbstractContextManager[Any]:
        if self.arm is None or not self.arm.get("plans"):
            return contextlib.nullcontext()
        from plans import random_plans

        schedules = ("auto", "dear") if self.arm.get("shard_optimizer") else ("auto", "dear", "allreduce")
        return random_plans(self.program.seed, schedules=schedules)

    def _plain(self, part: Part) -> None:
        if (wire := self.reference.get("wire")) in ("bfloat16", "float16"):
            part.ddp.register_comm_hook(getattr(torch, wire), wire_dtype_hook)
        elif self.ranks > 2:
            part.ddp.register_comm_hook(None, rank_order_hook)

    def detach(self) -> None:
        """Where the script has `state.detach()`."""
        for part in self.parts:
            if part.state is not None:
                part.state.detach()

    def see(self, value: Any) -> None:
        """Keep what the script looks at."""
        self.seen.append(snapshot(value))

    # Batches and losses.

    def samples_of(self, index: int) -> list[int]:
        """How many samples each rank has in a batch."""
        sizes = self.script.get("sizes", "equal")
        if sizes == "equal":
            return [SAMPLES] * self.ranks
        draw = random.Random(31 * index + self.program.seed)
        counts = [draw.randint(1, 2 * SAMPLES) for _ in range(self.ranks)]
        if sizes == "zeros" and (index + self.program.seed) % 2:  # of odd seeds in the first batch, too
            counts[draw.randrange(self.ranks)] = 0
        return counts

    def batch(self, index: int, size: int | None = None) -> tuple[Tensor, Tensor]:
        """A batch of this rank, the same whenever it is asked for."""
        generator = torch.Generator().manual_seed(1000 * index + self.rank + 7 * self.program.seed)
        dtype = getattr(torch, self.script.get("dtype", "float32"))
        size = SAMPLES if size is None else size
        x = torch.randn(size, INPUTS, generator=generator, device="cpu")
        return x.to(dtype), torch.randn(size, OUTPUTS, generator=generator, device="cpu").to(dtype)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean over a batch, of one or several forwards."""
        call = self.main.ddp.forward if self.script.get("by_name") else self._model
        with torch.autocast("cpu", torch.bfloat16, enabled=self.script.get("autocast", False)):
            output = call(x)
            for _ in range(self.script.get("forwards", 1) - 1):
                output = output + call(x * 0.5)
            if len(self.parts) > 1 and self.script["second"] == "one_optimizer":
                output = output + self.parts[1].ddp(x)
        if self.raises == "loss":
            self.raises = ""
            self.awaits_backward = True
            raise Boom
        loss = nn.functional.mse_loss(output.to(y.dtype), y)
        penalty = self.script.get("penalty", "")
        if penalty == "weights":
            loss = loss + sum(p.square().sum() for p in self.main.parameters if p.numel()) * 1e-3
        elif penalty == "input":
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum() * 0.1
        return loss

    @property
    def _model(self) -> nn.Module:
        past_ddp = self.script.get("past_ddp", "")
        is_past = past_ddp == "always" or (past_ddp == "sometimes" and self.step_number % 3 == 1)
        return self.main.net if is_past else self.main.ddp

    def raise_in_forward(self) -> Any:
        """Have the next forward of the model raise."""

        def fail(*_: Any) -> None:
            handle.remove()
            raise Boom

        handle = list(self.main.net.modules())[-1].register_forward_pre_hook(fail)
        return handle

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        mode = self.script.get("mode", "")
        if mode == "device":
            return torch.device("cpu")
        return PassingMode() if mode == "function" else contextlib.nullcontext()

    @contextlib.contextmanager
    def _around_step(self) -> Iterator[None]:
        how = self.script.get("step_in", "")
        if how == "fp64":
            torch.set_default_dtype(torch.float64)
        around = {
            "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
            "inference_mode": torch.inference_mode,
            "function_mode": PassingMode,
        }
        try:
            with around.get(how, contextlib.nullcontext)():
                yield
        finally:
            torch.set_default_dtype(torch.float32)

    def _traced(self, step: int) -> contextlib.AbstractContextManager[Any]:
        is_traced = self.arm is not None and self.arm.get("trace") and step == self.program.steps // 2
        return self.main.state.trace() if is_traced and self.main.state is not None else contextlib.nullcontext()

    # One step.

    def _step(self, step: int) -> None:
        self._happen(step, "begin")
        if self.script.get("collects_garbage") and (step + self.rank) % 3 == 0:
            gc.collect()
        self.step_number = step
        self._choose_trained("step", step)
        if step == self.program.seed % self.program.steps:
            for optimizer in self.main.optimizers:
                if change := getattr(optimizer, "change", None):
                    change()
        try:
            self._optimize(step)
            self.awaits_backward = False
        except Boom:
            self.see("raised")
        self._average_edits()
        if self.script.get("one_rank_evaluates") and not self.rank:
            self.see(EVENTS["evaluate"](self))
        self._happen(step, "stepped")
        if len(self.parts) > 1 and self.script["second"] == "alternate":
            self._train_second(step)
        if self.scheduler is not None:
            self.scheduler.step()

    def _choose_trained(self, when: str, number: int = 0) -> None:
        """Freeze and thaw; one parameter is always trained, so that every loss has a gradient."""
        how, every = self.script.get("trained", ""), self.trainable
        draw = random.Random(97 * number + self.program.seed)
        kept: list[nn.Parameter] = every
        if (when, how) in (("prepared", "frozen_for_good"), ("prepared", "frozen_before_attach"),
                           ("attached", "frozen_after_attach")):  # fmt: skip
            kept = every[1::2]
        elif (when, how) in (("step", "each_step"), ("micro_batch", "each_micro_batch")):
            kept = [p for p in every if draw.random() < 0.5]
        elif (when, how) == ("step", "layers"):
            if number % 3:
                return
            kept = list(draw.choice(list(self.main.net.children())).parameters())
        elif (when, how) == ("step", "by_optimizer"):
            kept = [p for group in self._stepping[0].param_groups for p in group["params"]]
        elif when != "step" or not how.startswith(("frozen_before", "frozen_after")) or number != THAWED_AT:
            return
        for p in every:
            p.requires_grad_(any(p is one for one in (*kept, every[-1])))

    def _thaw_for_last(self) -> None:
        if self.script.get("trained") == "each_micro_batch":
            for p in self.trainable:
                p.requires_grad_(True)

    @property
    def _stepping(self) -> list[Optimizer]:
        """The optimizers that make a step now: all, or one after the other."""
        optimizers = self.main.optimizers
        in_turn = self.script.get("trained") == "by_optimizer"
        return [optimizers[self.step_number % len(optimizers)]] if in_turn else optimizers

    @torch.no_grad()
    def _edit(self, when: str) -> None:
        """A rank's own edit of parameters, by a local rule."""
        how = self.script.get("local_edits", "")
        if how == when or (how == "as_data" and when == "before_step"):
            for p in self.main.parameters[::2]:
                (p.data if how == "as_data" else p).add_(0.01 * (self.rank + 1))

    @torch.no_grad()
    def _average_edits(self) -> None:
        if self.script.get("local_edits"):
            for p in self.main.parameters[::2]:
                dist.all_reduce(p)
                p /= self.ranks

    def _optimize(self, step: int) -> None:
        self._edit("before_forward")
        zero = self.script.get("zero", "before")
        if self.script.get("closure"):

            def closure() -> Tensor:
                if zero != "between":
                    self._zero(zero)
                loss = self._backward(step)
                self._happen(step, "gradients")
                self._clip()
                self._happen(step, "clipped")
                self._edit("before_step")
                return loss

            self.main.optimizers[0].step(closure)
            for optimizer in self.main.optimizers[1:]:
                optimizer.step()
        else:
            if not zero.endswith(("after", "between")):
                self._zero(zero)
            self._backward(step)
            self._happen(step, "gradients")
            if self.is_scaled and self.script.get("clip"):
                for optimizer in self.main.optimizers:
                    self.scaler.unscale_(optimizer)
            self._clip()
            self._happen(step, "clipped")
            self._edit("before_step")
            if self.skips:
                self.skips = False
                for optimizer in self.main.optimizers:
                    if self.is_scaled:
                        self.scaler.unscale_(optimizer)
            else:
                for optimizer in self._stepping:
                    with self._around_step():
                        self.scaler.step(optimizer)
            self.scaler.update()
            self._clip("late")
            if zero.endswith("after"):
                self._zero(zero)
        if self.is_scaled:
            self.see(self.scaler.get_scale())
        self._average()

    def _zero(self, how: str) -> None:
        if how == "never" or (how == "some_steps" and self.step_number % 3):
            return
        if how == "by_hand":
            for parameter in self.main.parameters:
                parameter.grad = None
        elif how == "by_model":
            self.main.ddp.zero_grad()
        else:
            for optimizer in self.main.optimizers:
                optimizer.zero_grad(set_to_none=not how.startswith("zeros"))

    def _backward(self, step: int) -> Tensor:
        micro = self.script.get("micro_batches", 1)
        sizes = [self.samples_of(micro * step + index) for index in range(micro)]
        mine, total = sum(of_ranks[self.rank] for of_ranks in sizes), sum(map(sum, sizes))
        around_all = self.script.get("batch_around") == "all" and micro > 1
        losses = torch.zeros(())
        with self.counted(mine) if around_all else contextlib.nullcontext():
            for index, of_ranks in enumerate(sizes):
                count = of_ranks[self.rank]
                is_last = index == micro - 1
                # Plain DDP learns a static graph in the first backward that it reduces, which must be the first of all.
                learns = self.script.get("static_graph") and not step
                syncs = is_last or learns or self.script.get("reduce_each", False)
                adds_up = contextlib.nullcontext() if syncs else self._no_sync()
                with adds_up, contextlib.nullcontext() if around_all else self.counted(count):
                    losses = losses + self._micro_batch(micro * step + index, count, mine, total, step)
        self.see(losses)
        return losses

    def _micro_batch(self, index: int, count: int, mine: int, total: int, step: int) -> Tensor:
        # Of a backward through two models nobody can tell beforehand: it takes any sample, through both.
        if not count and self.weights and self.script.get("second") != "one_optimizer":
            return torch.zeros(())
        with torch.random.fork_rng([], enabled=not count):  # nor does a rank without data draw random numbers here
            return self._train_on(index, count, mine, total, step)

    def _train_on(self, index: int, count: int, mine: int, total: int, step: int) -> Tensor:
        is_last = index % self.script.get("micro_batches", 1) == self.script.get("micro_batches", 1) - 1
        # What the last one does not reduce, DDP leaves to each rank.
        if is_last and not self.script.get("reduce_each"):
            self._thaw_for_last()
        else:
            self._choose_trained("micro_batch", index)
        x, y = self.batch(index, max(count, 1))
        if self.script.get("penalty") == "input":
            x.requires_grad_()
        loss = shown = self.loss(x, y) * (count / mine if mine else 0.0)
        if self.is_weighted_reference:
            loss = loss * (mine * self.ranks / total)
        if self.script.get("overflow") and step == self.program.steps // 2:
            loss = self._overflowing(loss)
        if self.script.get("zero") == "between" and not index % self.script.get("micro_batches", 1):
            self._zero("between")
        self.scaler.scale(loss).backward()
        self._clip("each")
        return shown.detach().float()

    def _overflowing(self, loss: Tensor) -> Tensor:
        if self.script.get("habit") != "skips_non_finite":
            return loss * float("inf")
        return loss + self.trainable[-1].sum() * float("inf")  # of one parameter only

    @property
    def weights(self) -> bool:
        """Whether this arm tells its state how many samples it has."""
        return self.arm is not None and bool(self.arm.get("weighted")) and self.main.state is not None

    @property
    def is_weighted_reference(self) -> bool:
        """Whether plain DDP multiplies losses so that samples count alike."""
        return self.arm is None and bool(self.reference.get("weighted"))

    def counted(self, samples: int) -> contextlib.AbstractContextManager[Any]:
        """Around a batch of so many samples."""
        if not self.weights:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for part in self.parts if self.script.get("second") == "one_optimizer" else self.parts[:1]:
            stack.enter_context(part.state.batch(samples))
        return stack

    def _no_sync(self) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for part in self.parts if self.script.get("second") == "one_optimizer" else self.parts[:1]:
            stack.enter_context(part.ddp.no_sync())
        return stack

    def _clip(self, when: str = "") -> None:
        if self.script.get("clip_when", "") != when:
            return
        how, parameters = self.script.get("clip", ""), self.main.parameters
        if how == "own" and self.main.state is not None:
            self.see(self.main.state.clip_grad_norm_(MAX_NORM))
        elif how in ("norm", "own"):
            self.see(nn.utils.clip_grad_norm_(parameters, MAX_NORM))
        elif how == "one_norm":
            self.see(nn.utils.clip_grad_norm_(parameters, MAX_NORM, norm_type=1.0))
        elif how == "loop":
            self.see(nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=False))
        elif how == "one_layer":
            self.see(nn.utils.clip_grad_norm_(parameters[:2], MAX_NORM))
        elif how == "log":
            self.see(nn.utils.clip_grad_norm_(parameters, float("inf")))
        elif how == "value":
            nn.utils.clip_grad_value_(parameters, 0.05)

    def _average(self) -> None:
        average, how = self.average, self.script.get("average", "")
        is_ours = self.arm is not None and how == "own" and self.main.state is not None
        if average is None or is_ours:
            return
        if how == "by_hand":
            with torch.no_grad():
                for mean, parameter in zip(average, self.main.parameters, strict=True):
                    mean.lerp_(parameter, 1 - DECAY)
        else:
            average.update_parameters(self.main.net)

    def _train_second(self, step: int) -> None:
        part = self.parts[1]
        x, y = self.batch(10_000 + step)
        with part.state.batch(SAMPLES) if self.weights else contextlib.nullcontext():
            loss = nn.functional.mse_loss(part.ddp(x), y)
            loss.backward()
        part.optimizers[0].step()
        part.optimizers[0].zero_grad()
        self.see(loss)

    def _happen(self, step: int, place: str) -> None:
        for event in self.events.get((step, place), ()):
            # Draws are made by all, so that ranks stay alike.
            self.event_seed = self.draw.randrange(1 << 30)
            if event.rank is None or event.rank % self.ranks == self.rank:
                self.see((event.name, EVENTS[event.name](self)))

    def consolidate(self) -> None:
        """`state.consolidate()`, which a script needs before it reads the state of sharded optimizers."""
        for part in self.parts:
            if part.state is not None:
                part.state.consolidate()

    def final(self) -> dict[str, Any]:
        """All that a script can read in the end. No `synchronize()`: it must be right without."""
        self.consolidate()
        average = self.average
        if isinstance(average, nn.Module):
            average = average.state_dict()
        return snapshot(
            {
                "gradients": [[p.grad for p in part.parameters] for part in self.parts],
                "models": [part.net.state_dict() for part in self.parts],
                "optimizers": [optimizer.state_dict() for part in self.parts for optimizer in part.optimizers],
                "average": average,
                "scaler": self.scaler.state_dict(),
            }
        )
