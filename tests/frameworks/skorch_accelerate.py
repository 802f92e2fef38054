"""skorch: `NeuralNetClassifier` with `AccelerateMixin`, gradient clipping, a learning rate schedule and checkpoints."""

from pathlib import Path

import digests
import made_up
import torch
from accelerate import Accelerator
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint, GradientNormClipping, LRScheduler
from skorch.dataset import ValidSplit
from skorch.hf import AccelerateMixin
from torch.nn.functional import cross_entropy


class Net(AccelerateMixin, NeuralNetClassifier):
    """The net that skorch's documentation makes for several processes."""


class CrossEntropy:
    """Not an `nn.Module`: on CPUs, Accelerate would wrap that in DDP, which takes no module without parameters."""

    def __call__(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(scores, target)


def main() -> None:
    torch.manual_seed(5)
    x, y = made_up.points(160).tensors
    accelerator = Accelerator(cpu=True)
    net = Net(
        made_up.net(),
        criterion=CrossEntropy,
        optimizer=torch.optim.Adam,
        lr=1e-2,
        max_epochs=5,
        batch_size=8,
        iterator_train__shuffle=True,
        train_split=ValidSplit(5),
        accelerator=accelerator,
        unwrap_after_train=False,
        verbose=0,
        callbacks=[
            GradientNormClipping(1.0),
            LRScheduler("ExponentialLR", gamma=0.9),
            Checkpoint(dirname="saved", f_pickle=None, monitor=None),
        ],
    )
    net.fit(x.numpy(), y.numpy())
    accelerator.wait_for_everyone()
    digests.say(net.module_, net.optimizer_.optimizer, Path("saved/params.pt"), Path("saved/optimizer.pt"))


if __name__ == "__main__":
    main()
