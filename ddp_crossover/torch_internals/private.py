"""The look-up of a private name, whose error says which versions of torch have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

CHECKED_ON = "2.11 to 2.15"


def private(owner: Any, name: str) -> Any:
    """Return ``owner.name``.

    Raises:
        RuntimeError: if this version of torch does not have it.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        raise RuntimeError(
            f"ddp_crossover needs {getattr(owner, '__name__', type(owner).__name__)}.{name}, which torch "
            f"{torch.__version__} does not have (checked on torch {CHECKED_ON}); "
            "install one of these versions, or train without the hook"
        ) from None


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which ``owner.name`` is ``value``. Raises RuntimeError if this version of torch does not have it."""
    before = private(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
