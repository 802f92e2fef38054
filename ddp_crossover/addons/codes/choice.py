"""Which codecs a link gets: in compiled loops if it codes on the host and numba is there, else in operations of torch.

Both make the same payloads, so ranks may differ.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeVar, cast

from ddp_crossover.addons.codes.codec import Codec

KindOfCodec = TypeVar("KindOfCodec", bound=Codec)


def fastest(codec: type[KindOfCodec], *, on_host: bool) -> type[KindOfCodec]:
    """``codec``, or the same one in compiled loops.

    Args:
        codec: in operations of torch, for tensors on any device.
        on_host: whether slices are coded on the host.
    """
    return cast(type[KindOfCodec], compiled().get(codec, codec)) if on_host else codec


@functools.cache
def compiled() -> Mapping[type[Codec], type[Codec]]:
    """Codecs in compiled loops, by those in operations of torch; none without numba.

    numba is imported, and the loops are compiled or taken from its cache, by the first call.
    """
    try:
        import numba
    except ImportError:  # also its own, about a numpy that it does not know yet
        return {}
    if getattr(numba.config, "DISABLE_JIT", 0):  # by its environment variable: the loops would be Python's
        return {}
    from ddp_crossover.addons.codes.compiled import COMPILED

    return COMPILED
