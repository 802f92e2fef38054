"""Layers that take statistics of batches, whose result depends on how samples are shared among ranks."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm


def statistics_of_a_rank(model: nn.Module) -> str | None:
    """A warning about layers whose statistics are those of one rank's own batch; None if there are none."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm) and module.track_running_stats
    ]
    if not names:
        return None
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{others} (BatchNorm) takes statistics of each rank's own batch, so its result depends on how "
        "samples are shared among ranks; that of GroupNorm and LayerNorm does not"
    )


def refuse_shared_statistics(model: nn.Module) -> None:
    """Raise ValueError for layers whose backward adds up losses of all ranks, before these are weighted."""
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm):
            raise ValueError(
                f"weighted=True weights each rank's gradients after its backward, and {name} (SyncBatchNorm) adds up "
                "those of all ranks in backward, as if they weighed the same: use BatchNorm, GroupNorm or LayerNorm, "
                "or leave out weighted=True and multiply each rank's mean loss by its samples * ranks / all samples"
            )
