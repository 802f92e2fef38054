"""Compiled modules and functions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ddp_crossover.torch_internals.private import private, replaced


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether the module is compiled: by ``torch.compile(module)``, ``module.compile()`` or a compiled ``forward``."""
    return is_compiled_in_place(module) or hasattr(module.forward, "_torchdynamo_orig_callable")


def is_compiled_function(value: object) -> bool:
    """Whether ``torch.compile`` has made it. Under a dispatch mode it would run uncompiled, and round differently."""
    return hasattr(value, "_torchdynamo_orig_callable") and not getattr(value, "_torchdynamo_disable", False)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called, after which no hook of the module runs eagerly."""
    return getattr(module, "_compiled_call_impl", None) is not None


def call_around_compiled(
    module: torch.nn.Module, before: Callable[[], None], after: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Run ``before`` and ``after`` around a compiled module, outside of its graph; returns the undo function."""
    # Set an attribute of the module instead of hooks, which would disable fused fast paths.
    name = "_compiled_call_impl" if is_compiled_in_place(module) else "forward"
    own = vars(module).get(name)
    call = vars(module)[name] = _AroundCompiled(private(module, name), own, before, after)

    def undo() -> None:
        call.stop()
        # Another model that has the same module may have been undone before, below this one.
        while isinstance(around := vars(module).get(name), _AroundCompiled) and around.is_stopped:
            vars(module)[name] = around.own
            if around.own is None:
                del vars(module)[name]

    return undo


class _AroundCompiled:
    def __init__(
        self, compiled: Callable[..., Any], own: Any, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        self.own = own
        self.is_stopped = False
        self._compiled = compiled
        self._before = before
        self._after = after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._compiled(*args, **kwargs)  # traced into outer compiled code, which is wrapped itself
        self._before()
        try:
            return self._compiled(*args, **kwargs)
        finally:
            self._after()

    def stop(self) -> None:
        """Run nothing more around it; other code, or another model's wrapper, may still call this object."""
        self.is_stopped = True
        self._before = self._after = _nothing

    def __reduce__(self) -> Any:
        # A copy of the module gets the unwrapped callable, as with plain DDP; a method is bound to the copy.
        return _unchanged, (self._compiled,)


def _nothing() -> None:
    pass


def _unchanged(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled


def called_by_compiled_code() -> bool:
    """Whether ``torch.compile`` is on the call stack, so that the code we return to may be compiled."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("_dynamo/eval_frame.py"):
            return True
        frame = frame.f_back
    return False


def on_compile_start(callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` before dynamo reads the objects that a frame uses; returns the undo function.

    Not done with dynamo's own start callbacks, because ``torch.compiler.reset()`` clears them and ``torch.export`` does
    not call them. Checked on torch 2.11 to 2.15.
    """
    convert_frame: Any = importlib.import_module("torch._dynamo.convert_frame")
    compile_frame = private(convert_frame, "compile_frame")
    if not isinstance(compile_frame, _CallBefore):
        compile_frame = convert_frame.compile_frame = _CallBefore(compile_frame)
    compile_frame.callbacks.append(callback)
    return lambda: compile_frame.callbacks.remove(callback)


class _CallBefore:
    def __init__(self, compile_frame: Callable[..., Any]) -> None:
        self._compile_frame = compile_frame
        self.callbacks: list[Callable[[], None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Clear this flag, which torch 2.15 has set by now: optimizers that see it would add up in another way.
        with replaced(torch.compiler, "_is_compiling_flag", False):
            for callback in self.callbacks:
                callback()
        return self._compile_frame(*args, **kwargs)
