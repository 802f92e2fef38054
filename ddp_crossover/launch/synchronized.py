"""Compares parameters across ranks: DDP that is trained as it should be has the same ones everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.log import first_of


def digest(tensor: Tensor) -> str:
    """Return a digest of the tensor's values, dtype and shape."""
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(values.tobytes(), digest_size=8, key=f"{tensor.dtype}{[*tensor.shape]}".encode()).hexdigest()


def named(what: str, models: Sequence[DistributedDataParallel]) -> Iterator[tuple[str, Tensor]]:
    """Yield the ``named_parameters`` or ``named_buffers`` of models, with the model's number if there are several."""
    for number, ddp in enumerate(models, 1):
        for name, tensor in getattr(ddp.module, what)():
            yield (f"model {number}: {name}" if len(models) > 1 else name), tensor


def parameter_digests(models: Sequence[DistributedDataParallel]) -> dict[str, str]:
    """Return the digest of each parameter that is trained."""
    return {name: digest(parameter) for name, parameter in named("named_parameters", models)}


def why_different(ranks: Iterable[Mapping[str, str]], why_apart: str | None = None) -> str | None:
    """Return one sentence about parameters that ranks have differently; None if all are the same.

    Args:
        ranks: the digests of each rank.
        why_apart: what was said while they trained; None if nothing was.
    """
    first, *others = ranks
    names = [name for name in first if any(other.get(name) != first[name] for other in others)]
    if not names:
        return None
    if why_apart is not None:
        return f"The ranks have different parameters ({first_of(names)}): {why_apart}."
    return (
        f"The ranks have different parameters: gradients of {first_of(names)} were never reduced, or something else "
        "has changed these on some ranks only."
    )
