"""MONAI: `SupervisedTrainer` and `SupervisedEvaluator` on a small UNet, with a `CheckpointSaver`."""

from pathlib import Path

import digests
import torch
import torch.distributed as dist
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import CheckpointSaver, LrScheduleHandler, MeanDice, ValidationHandler, from_engine
from monai.inferers import SimpleInferer
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from monai.transforms import AsDiscreted, Compose, RandFlipd, RandGaussianNoised
from monai.utils import set_determinism
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    set_determinism(5)
    images = [
        {"image": torch.randn(1, 16, 16), "label": (torch.rand(1, 16, 16) > 0.6).float(), "id": i} for i in range(32)
    ]
    both = ("image", "label")
    data = Dataset(images, Compose([RandFlipd(both, prob=0.5), RandGaussianNoised("image", prob=0.5)]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    net = UNet(2, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, norm="batch", dropout=0.1)
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(ddp.parameters(), 1e-2)
    device = torch.device("cpu")
    post = AsDiscreted(("pred", "label"), argmax=(True, False), to_onehot=2)
    evaluator = SupervisedEvaluator(
        device,
        DataLoader(Dataset(images[:8]), batch_size=4),
        ddp,
        postprocessing=post,
        key_val_metric={"dice": MeanDice(include_background=False, output_transform=from_engine(["pred", "label"]))},
    )
    trainer = SupervisedTrainer(
        device,
        max_epochs=6,
        train_data_loader=loader,
        network=ddp,
        optimizer=optimizer,
        loss_function=DiceCELoss(to_onehot_y=True, softmax=True),
        inferer=SimpleInferer(),
        train_handlers=[
            ValidationHandler(2, evaluator),
            LrScheduleHandler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), print_lr=False),
            CheckpointSaver("saved", {"net": ddp, "optimizer": optimizer}, save_final=True, final_filename="last.pt"),
        ],
    )
    trainer.run()
    dist.barrier()
    digests.say(ddp, optimizer, Path("saved/last.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
