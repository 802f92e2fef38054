"""Has torchrun say why a rank has failed: what it prints at the end hides what ranks have said before."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path


def tell_torchrun(why: str) -> None:
    """Have torchrun's summary of failed ranks, its last lines, quote ``why``; without torchrun nothing happens.

    In the format of ``torch.distributed.elastic.multiprocessing.errors``, whose own writer adds a traceback.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        error = {"message": {"message": why, "extraInfo": {"timestamp": int(time.time())}}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(error))
