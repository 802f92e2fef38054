"""Settings of the environment that do not go with legs on NCCL."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Each has an older name, which torch still reads (ProcessGroupNCCL.hpp, torch 2.11 to 2.15).
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_TRUE = ("y", "yes", "1", "t", "true", "on")
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_GOES_ON = {"0": "errors are not handled", "2": "communicators are aborted and the process goes on"}


def refuse_unsafe_settings(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse settings under which a rank would apply gradients that have not arrived, or wait for ever.

    Raises:
        ValueError: the message names the variable and the way out.
    """
    for name in _BLOCKING_WAIT:
        if environ.get(name, "").strip().lower() in _TRUE:
            raise ValueError(
                f"{name}={environ[name]} makes the host wait for every leg, so that nothing would overlap, and turns "
                "off the watchdog, so that a leg whose peer has died would never end: unset it"
            )
    for name in _ERROR_HANDLING:
        if (why := _GOES_ON.get(environ.get(name, "").strip())) is not None:
            raise ValueError(
                f"{name}={environ[name]} means that {why}, so a leg that fails would leave gradients that were never "
                "summed, and training would apply them: unset it, or set it to 1 or 3"
            )


def why_streams_block(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why legs would hold up compute, or None."""
    if environ.get(_CONNECTIONS, "").strip() != "1":
        return None
    return (
        f"{_CONNECTIONS}=1 puts all streams into one queue of the GPU, in which a leg that waits for gradients or "
        "peers holds up compute: unset it, unless another library in this process needs it"
    )
