"""Models whose forward hands parameters to code that no function override of Python sees."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from models import HIDDEN, INPUTS, OUTPUTS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def bias_gelu(bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Megatron's, a little shorter."""
        x = bias + y
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @torch.jit.script
    def scripted_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A product whose weight only the script's interpreter reads."""
        return x @ weight.t()


# TorchScript watches its first calls in a process and then runs other kernels, with other last bits: the
# arm that comes first would differ from any other.
_UNOPTIMIZED = partial(torch.jit.optimized_execution, False)


class ScriptedBiasNet(nn.Module):
    """Megatron's MLP: the bias is added in a scripted function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN, bias=False)
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _UNOPTIMIZED():
            return self.head(bias_gelu(self.bias, self.first(x)))


class ScriptedWeightNet(nn.Module):
    """The same with a weight, which is the first that a forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, INPUTS) * 0.3)
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _UNOPTIMIZED():
            return self.head(torch.tanh(scripted_matmul(x, self.weight)))


class _Product(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t()


class ScriptedModuleNet(nn.Module):
    """Layers as e3nn compiles them: a scripted module, to which the layer's own forward passes the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, INPUTS) * 0.3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.product = torch.jit.script(_Product())
            self.frozen = torch.jit.script(nn.Linear(HIDDEN, HIDDEN).requires_grad_(False))
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _UNOPTIMIZED():
            return self.head(self.frozen(torch.tanh(self.product(x, self.weight))))


class _ScriptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return scripted_matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class ScriptInFunctionNet(ScriptedWeightNet):
    """An autograd function whose forward hands the weight on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _UNOPTIMIZED():
            return self.head(torch.tanh(_ScriptedLinear.apply(x, self.weight)))


class LateScriptNet(ScriptedBiasNet):
    """Adds its bias in Python at first, and in the scripted function from the `late`th forward on."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.late:
            return super().forward(x)
        return self.head(F.gelu(self.first(x) + self.bias, approximate="tanh"))


class _Activation(torch.Tensor):
    """Runs every function with the overrides of all subclasses switched off."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if type(result) is torch.Tensor else result


class SubclassActivationNet(nn.Module):
    """Activations are of a subclass, as quantized and annotated tensors are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INPUTS, HIDDEN) * 0.3)
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x.as_subclass(_Activation) @ self.weight)
        return self.head(hidden).as_subclass(torch.Tensor)


class PaddedEncoderNet(nn.Module):
    """A `TransformerEncoder` with a padding mask, which drops padded positions on its fast path."""

    def __init__(self, always_eval: bool = False) -> None:
        super().__init__()
        self.always_eval = always_eval
        self.embed = nn.Linear(1, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 11, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, OUTPUTS)
        self.train()

    def train(self, mode: bool = True) -> PaddedEncoderNet:
        super().train(mode)
        if self.always_eval:
            self.encoder.eval()
        return self

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """The encoder's output, padded positions and all."""
        return self.encoder(self.embed(x.unsqueeze(-1)), src_key_padding_mask=padding(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x).sum(1))


def padding(x: torch.Tensor) -> torch.Tensor:
    """True at padded positions: another number of them in each row."""
    lengths = torch.arange(len(x)).remainder(3) + INPUTS - 3
    return torch.arange(INPUTS) >= lengths.unsqueeze(1)


class ScaledOutputNet(nn.Module):
    """Backward needs the value of a parameter itself, not of a view of it, first of all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, OUTPUTS)
        self.scale = nn.Parameter(torch.full((OUTPUTS,), 1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)) * self.scale


class CheckpointedMatricesNet(nn.Module):
    """Matrices only, so that Muon can train it; checkpointed in one of three ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(INPUTS, HIDDEN, bias=False)
        self.block = nn.Sequential(
            nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Tanh()
        )
        self.head = nn.Linear(HIDDEN, OUTPUTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.how == "selective":
            contexts = partial(create_selective_checkpoint_contexts, _saves_products)
            hidden = checkpoint(self.block, hidden, use_reentrant=False, context_fn=contexts)
        else:
            hidden = checkpoint(self.block, hidden, use_reentrant=self.how == "reentrant")
        return self.head(hidden)


def _saves_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class CompiledClosureNet(nn.Module):
    """A compiled function that closes over a parameter instead of taking it as an argument."""

    def __init__(self, fullgraph: bool) -> None:
        super().__init__()
        torch.compiler.reset()
        weight = torch.randn(INPUTS, HIDDEN) * 0.3
        self.weight = parameter = nn.Parameter(weight)
        self.head = nn.Linear(HIDDEN, OUTPUTS)

        def project(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ parameter)

        self.project: Callable[..., torch.Tensor] = torch.compile(project, backend="eager", fullgraph=fullgraph)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.project(x))


class MyParameter(nn.Parameter):
    """A parameter of a class of its own, with an attribute."""

    tag = "mine"


class SubclassParameterNet(nn.Module):
    """All parameters, or the first only, are of a subclass."""

    def __init__(self, of_all: bool) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.second = nn.Linear(HIDDEN, OUTPUTS)
        layers: Sequence[nn.Linear] = (self.first, self.second) if of_all else (self.first,)
        for layer in layers:
            layer.weight = MyParameter(layer.weight.detach().clone())
            layer.bias = MyParameter(layer.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))
