"""Attaching inside of frameworks that build DDP and optimizers themselves; each file needs its own framework only.

Fabric, and loops of one's own, need none of this: ``attach`` takes what they hand out.
"""

from importlib import import_module


def __getattr__(name: str) -> object:
    if name in ("accelerate", "lightning", "transformers"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
