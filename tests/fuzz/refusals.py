"""Errors that are answers: what `attach` or a step refuses, by name. Anything else that raises is a failure."""

from __future__ import annotations

import re

REFUSALS = {
    "sharded: an optimizer that cannot be": r"shard_optimizer=True cannot shard|step\(\) cannot update shards, b",
    "an optimizer that begins to do what forbids to defer": r"which it did not do in the steps that were watched"
    r"|the optimizer's update of its shards has failed on rank",
    "what follows steps: an optimizer without hooks": r"cannot follow \w+, whose class skips Optimizer\.__init__",
    "sharded: ranks whose parameters differ": r"is not the same on all ranks before optimizer\.step\(\)",
    "sharded: a parameter of another model": r"trains a parameter of shape .* that this DDP model does not reduce",
    "sharded: a parameter given after attach": r"after attach, and shard_optimizer=True shares only those that it had",
    "sharded: a gradient kept over a backward": r"was not read before the next backward, and is spread over the ranks",
    # After a change of dtype torch has another place to accumulate, and DDP's own hooks never run again.
    "sharded: gradients that DDP no longer reduces": r"or has had another dtype or device, since DDP was built",
    "a gradient where another parameter's belongs": r"a script has given .* the gradient of another parameter",
    "weighted: unequal batches after detach": r"the model is not attached, so DDP would weight ranks equally",
    "weighted: gradients that DDP has not reduced": r"not reduced( by DDP in this step,)? and so not weighted",
    "weighted: a forward outside of batch()": r"attached with weighted=True: put its forward and its backward into",
}


def refusal(error: str) -> str | None:
    """The name of the refusal that a traceback ends with; None if it is on no list."""
    last = error.strip().splitlines()[-1] if error.strip() else ""
    return next((name for name, pattern in REFUSALS.items() if re.search(pattern, last)), None)
