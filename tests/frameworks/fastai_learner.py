"""fastai: `Learner.distrib_ctx` with `fit_one_cycle`, mixup, checkpoints; `--own` takes fastai's own optimizers."""

import os
import sys
from pathlib import Path

import digests
import numpy as np
import torch
from fastai.basics import DataLoaders, Learner, OptimWrapper, set_seed
from fastai.callback.schedule import fit_one_cycle  # noqa: F401
from fastai.callback.tracker import SaveModelCallback
from fastai.data.load import DataLoader
from fastai.distributed import DistributedDL
from fastai.optimizer import Adam
from torch import nn


class CpuDistributedDL(DistributedDL):
    """fastai's own moves the indices to a GPU, to broadcast them."""

    def _broadcast(self, indices: list[int], rank: int) -> list[int]:
        sent = torch.tensor(indices)
        torch.distributed.broadcast(sent, rank)
        return sent.tolist()


def main() -> None:
    torch.distributed.init_process_group("gloo")
    set_seed(5, reproducible=True)
    data = [(torch.randn(12), torch.randint(0, 3, ())) for _ in range(96)]
    loaders = DataLoaders(
        *(CpuDistributedDL(DataLoader(data, bs=8, shuffle=shuffle, num_workers=0, device=torch.device("cpu"))) for shuffle in (True, False))
    )
    net = nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
    optimizer = Adam if "--own" in sys.argv else lambda groups, **options: OptimWrapper(groups, torch.optim.AdamW)
    learner = Learner(loaders, net, loss_func=nn.CrossEntropyLoss(), opt_func=optimizer, lr=1e-2)
    with learner.distrib_ctx(sync_bn=False, cpu=True), learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(5, 1e-2, cbs=SaveModelCallback(every_epoch=True))
    torch.distributed.barrier()
    inner = [] if "--own" in sys.argv else learner.opt.opt
    digests.say(learner.model, inner, Path("models/model_4.pth"), learner.opt.state_dict())


if __name__ == "__main__":
    main()
