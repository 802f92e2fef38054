"""fastai: `Learner.distrib_ctx` with `fit_one_cycle`, an optimizer of torch and checkpoints."""

from pathlib import Path

import digests
import made_up
import torch
from fastai.basics import DataLoaders, Learner, OptimWrapper, set_seed
from fastai.callback.schedule import fit_one_cycle  # noqa: F401
from fastai.callback.tracker import SaveModelCallback
from fastai.data.load import DataLoader
from fastai.distributed import DistributedDL


class CpuDistributedDL(DistributedDL):
    """fastai's own moves the indices to a GPU, to broadcast them."""

    def _broadcast(self, indices: list[int], rank: int) -> list[int]:
        sent = torch.tensor(indices)
        torch.distributed.broadcast(sent, rank)
        return sent.tolist()


def main() -> None:
    torch.distributed.init_process_group("gloo")
    set_seed(5, reproducible=True)
    data, cpu = list(made_up.points(96)), torch.device("cpu")
    loaders = DataLoaders(
        *(CpuDistributedDL(DataLoader(data, bs=8, shuffle=one, num_workers=0, device=cpu)) for one in (True, False))
    )

    def optimizer(groups: list[list[torch.nn.Parameter]], **options: object) -> OptimWrapper:
        return OptimWrapper(groups, torch.optim.AdamW)

    learner = Learner(loaders, made_up.net(), loss_func=torch.nn.CrossEntropyLoss(), opt_func=optimizer, lr=1e-2)
    with learner.distrib_ctx(sync_bn=False, cpu=True), learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(5, 1e-2, cbs=SaveModelCallback(every_epoch=True))
    torch.distributed.barrier()
    digests.say(learner.model, learner.opt.opt, Path("models/model_4.pth"))


if __name__ == "__main__":
    main()
