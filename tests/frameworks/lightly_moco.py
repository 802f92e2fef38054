"""lightly: MoCo (momentum encoder, memory bank over all ranks), or DINO with `--dino`, in Lightning as in examples."""

import copy
import sys
from pathlib import Path

import digests
import lightning
import torch
from lightly.loss import DINOLoss, NTXentLoss
from lightly.models.modules import DINOProjectionHead, MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def backbone() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class MoCo(lightning.LightningModule):
    """Query and key encoders; keys of all ranks are the negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()
        self.projection_head = MoCoProjectionHead(16, 32, 8)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NTXentLoss(memory_bank_size=(64, 8), gather_distributed=True)

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        momentum = cosine_schedule(self.current_epoch, EPOCHS, 0.9, 1)
        update_momentum(self.backbone, self.backbone_momentum, momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, momentum)
        (x,) = batch
        query = self.projection_head(self.backbone(x + 0.1 * torch.randn_like(x)))
        with torch.no_grad():
            key = self.projection_head_momentum(self.backbone_momentum(x.flip(3)))
        return self.criterion(query, key)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)


class Dino(lightning.LightningModule):
    """Student and teacher; the last layer is frozen in the first epoch, by taking its gradients away."""

    def __init__(self) -> None:
        super().__init__()
        self.student_backbone, self.teacher_backbone = backbone(), backbone()
        self.student_head = DINOProjectionHead(16, 32, 16, 64, freeze_last_layer=1)
        self.teacher_head = DINOProjectionHead(16, 32, 16, 64)
        deactivate_requires_grad(self.teacher_backbone)
        deactivate_requires_grad(self.teacher_head)
        self.criterion = DINOLoss(64, warmup_teacher_temp_epochs=1)

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        momentum = cosine_schedule(self.current_epoch, EPOCHS, 0.9, 1)
        update_momentum(self.student_backbone, self.teacher_backbone, momentum)
        update_momentum(self.student_head, self.teacher_head, momentum)
        (x,) = batch
        views = [x + 0.1 * torch.randn_like(x), x.flip(3), x.flip(2)]
        teacher = [self.teacher_head(self.teacher_backbone(view)) for view in views[:2]]
        student = [self.student_head(self.student_backbone(view)) for view in views]
        return self.criterion(teacher, student, epoch=self.current_epoch)

    def on_after_backward(self) -> None:
        self.student_head.cancel_last_layer_gradients(current_epoch=self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    lightning.seed_everything(5, verbose=False)
    model = Dino() if "--dino" in sys.argv else MoCo()
    loader = DataLoader(TensorDataset(torch.randn(96, 3, 16, 16)), batch_size=8, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, devices=2, accelerator="cpu", strategy="ddp", sync_batchnorm=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=ModelCheckpoint("saved", filename="{epoch}", enable_version_counter=False),
    )  # fmt: skip
    lightning.seed_everything(5 + trainer.global_rank, verbose=False)
    trainer.fit(model, loader)
    digests.say(model, trainer.optimizers, Path(f"saved/epoch={EPOCHS - 1}.ckpt"))


if __name__ == "__main__":
    main()
