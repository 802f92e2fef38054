"""pytorch-ignite: `create_supervised_trainer` on `idist`, with accumulation, an average of weights and checkpoints."""

from pathlib import Path

import digests
import ignite.distributed as idist
import made_up
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EMAHandler, create_lr_scheduler_with_warmup
from ignite.metrics import Accuracy
from ignite.utils import manual_seed
from torch import nn


def main(_: int) -> None:
    manual_seed(5)
    model = idist.auto_model(made_up.net())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = idist.auto_dataloader(made_up.points(96), batch_size=8, shuffle=True)
    trainer = create_supervised_trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        gradient_accumulation_steps=2,
        output_transform=lambda *output: output[3].item(),
    )
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})
    average = EMAHandler(model, momentum=0.1)
    average.attach(trainer, event=Events.ITERATION_COMPLETED(every=2))
    scheduler = create_lr_scheduler_with_warmup(
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), warmup_start_value=1e-3, warmup_duration=5
    )
    trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate() -> None:
        evaluator.run(loader)

    saved = Checkpoint(
        {"model": model, "optimizer": optimizer, "average": average.ema_model, "trainer": trainer},
        DiskSaver("checkpoints", require_empty=False, create_dir=True),
        filename_pattern="{name}.pt",
    )
    trainer.add_event_handler(Events.EPOCH_COMPLETED(every=2), saved)
    trainer.run(loader, max_epochs=6)
    idist.barrier()
    digests.say(model, optimizer, Path("checkpoints/checkpoint.pt"), average.ema_model.state_dict())


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(main)
