#!/usr/bin/env bash
# open_clip_torch 3.3.0 with torch 2.15.0, CPU, gloo: gradients of its loss for several ranks, ClipLoss, under plain DDP.
#
# Behaviour: with the default options of open_clip_train (no --local-loss, no --gather-with-grad) the encoders' gradients on
# two ranks are half of those of one process with the same 8 pairs, and logit_scale's are the same: features of other ranks
# count as constants, and DDP averages. On n ranks it is 1/n, so --grad-clip-norm and weight decay mean something else on
# each number of ranks, also beside logit_scale. With gather_with_grad=True all gradients are those of one process.
#
# Seen (gradients on two ranks, divided by those of one process):
#   default: encoder 0.500, logit_scale 1.000
#   gather_with_grad: encoder 1.000, logit_scale 1.000
#
# Exits with 0 if it is so, with 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet torch==2.15.0 torchvision==0.29.2 open_clip_torch==3.3.0
cat > "$folder/gradients.py" <<'EOF'
import torch
import torch.distributed as dist
from open_clip.loss import ClipLoss
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(6, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        return normalize(self.image(image)), normalize(self.text(text)), self.logit_scale.exp()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model, image, text = TwoTowers(), torch.randn(8, 6), torch.randn(8, 6)
ClipLoss()(*model(image, text)).backward()
whole = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
ddp, mine = DistributedDataParallel(model), slice(4 * rank, 4 * rank + 4)
for name, options, expected in (("default", {}, 0.5), ("gather_with_grad", {"gather_with_grad": True}, 1.0)):
    ddp.zero_grad()
    ClipLoss(rank=rank, world_size=2, **options)(*ddp(image[mine], text[mine])).backward()
    grads = dict(model.named_parameters())
    encoder, scale = ((grads[one].grad / whole[one]).mean().item() for one in ("image.weight", "logit_scale"))
    if rank == 0:
        print(f"{name}: encoder {encoder:.3f}, logit_scale {scale:.3f}")
    assert abs(encoder - expected) < 1e-3 and abs(scale - 1) < 1e-3, "changed"
dist.destroy_process_group()
EOF
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$folder/gradients.py" 2> "$folder/err" ||
  { cat "$folder/err"; exit 1; }
