#!/usr/bin/env bash
# skorch 1.4.0 with accelerate 1.15.0 and torch 2.14.1, CPU, gloo: AccelerateMixin with LRScheduler("ReduceLROnPlateau").
#
# Behaviour: each rank's history has the losses of its own batches, and the scheduler reads them, so ranks go on with
# different learning rates. They apply the same averaged gradients with them: parameters differ, and nothing says so. (The
# documentation asks for a DistributedHistory where history matters.)
#
# Seen:
#   learning rates 2e-08 and 2e-07, weights differ by up to 0.46
#
# Exits with 0 if it is so, with 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet torch==2.14.1 skorch==1.4.0 accelerate==1.15.0
cat > "$folder/rates.py" <<'EOF'
import torch
import torch.distributed as dist
from accelerate import Accelerator
from skorch import NeuralNetRegressor
from skorch.callbacks import LRScheduler
from skorch.hf import AccelerateMixin
from torch import nn


class Net(AccelerateMixin, NeuralNetRegressor):
    pass


def squares(predicted, wanted):
    return (predicted - wanted).square().mean()


torch.manual_seed(0)
x, y = torch.randn(64, 6), torch.randn(64, 1)
accelerator = Accelerator(cpu=True)
net = Net(
    nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)),
    criterion=lambda: squares,  # a module without parameters would be wrapped in DDP, which refuses it
    optimizer=torch.optim.SGD,
    lr=0.2,
    max_epochs=12,
    batch_size=4,
    iterator_train__shuffle=True,
    train_split=None,
    accelerator=accelerator,
    callbacks=[LRScheduler("ReduceLROnPlateau", monitor="train_loss", patience=0)],
)
net.fit(x.numpy(), y.numpy())
rate = net.optimizer_.param_groups[0]["lr"]
weights = torch.cat([parameter.detach().flatten() for parameter in net.module_.parameters()])
ranks = [None, None]
dist.all_gather_object(ranks, (rate, weights))
(rate, weights), (other_rate, other_weights) = ranks
if accelerator.process_index == 0:
    print(f"learning rates {rate:.3g} and {other_rate:.3g}, weights differ by up to {(weights - other_weights).abs().max():.2g}")
assert rate != other_rate and not weights.equal(other_weights), "changed"
EOF
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$folder/rates.py" 2> "$folder/err" | tail -n 1 ||
  { cat "$folder/err"; exit 1; }
