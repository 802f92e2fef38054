"""Checks with CUDA graphs: one that is captured before attach, and one that comes too late for the package to know."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddp_crossover as dx
from gpu_check_parts import checks
from gpu_check_parts.training import Job, Recipe, digest, model_values

WARM_UP = 3
CAPTURED_AT = 10


class Replayed:
    """A linear layer whose output a CUDA graph computes from the addresses of its parameters; its backward does not."""

    def __init__(self, layer: nn.Linear, x: Tensor) -> None:
        self.layer = layer
        self._x = x.detach().clone()
        self._graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(WARM_UP):
                layer(self._x)
        torch.cuda.current_stream(x.device).wait_stream(side)
        # Threads of the package ask events meanwhile.
        with torch.no_grad(), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._y = layer(self._x)

    def replay(self, x: Tensor) -> Tensor:
        self._x.copy_(x)
        self._graph.replay()
        return self._y.clone()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Replay.apply(x, self.layer.weight, self.layer.bias, self)
        return out


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, replayed: Replayed) -> Tensor:
        ctx.save_for_backward(x)
        return replayed.replay(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        [x] = ctx.saved_tensors
        return None, grad.T @ x, grad.sum(0), None


def graph_captured(device: torch.device, recipe: Recipe, late: bool) -> dict[str, Any]:
    """A graph of the first layer, captured before the first step, must be exact; a late one that runs must be an error.

    A late one is exact after ``state.synchronize()`` before each replay.
    """
    checks.deterministic()
    captured_at = CAPTURED_AT if late else 0
    expected, _ = _train(device, recipe, captured_at, with_dear=False, synchronizes=False)
    if late:
        try:
            _train(device, recipe, captured_at, with_dear=True, synchronizes=False)
        except dx.StaleParameterError as error:
            assert "first" in str(error), f"the error names another parameter: {error}"
        else:
            raise AssertionError("a replay that read parameters before their update was not noticed")
    seen, pipelined = _train(device, recipe, captured_at, with_dear=True, synchronizes=late)
    largest = checks.judge_bits(recipe, seen, expected)
    return {"largest_difference": largest, "pipelined": pipelined, "digest": digest(seen)}


def _train(
    device: torch.device, recipe: Recipe, captured_at: int, *, with_dear: bool, synchronizes: bool
) -> tuple[dict[str, Any], str]:
    job = Job(recipe, device, dist.get_rank(), with_dear)
    net, replayed = job.ddp.module, None
    first = net.first
    assert isinstance(first, nn.Linear)
    seen: dict[str, Any] = {}
    try:
        for index in range(recipe.steps):
            batch = job.batch(index)
            if index == captured_at:
                if job.state is not None:
                    job.state.synchronize()
                replayed = Replayed(first, batch[0])
                first.forward = replayed.forward  # type: ignore[method-assign, assignment]
            elif synchronizes and replayed is not None:
                job.state.synchronize()
            seen[f"loss of step {index}"] = job.step([batch])["loss"].cpu()
        seen |= model_values(net)
        pipelined = "" if job.state is None else f"{job.state.stats().pipelined_iterations}/{recipe.steps}"
        return seen, pipelined
    finally:
        job.close()
