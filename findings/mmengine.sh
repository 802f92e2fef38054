#!/usr/bin/env bash
# mmengine 0.10.7 with torch 2.15.0, CPU, gloo: Runner and the options of DDP.
#
# Behaviour: the Runner's own option find_unused_parameters=True is dropped without a word where there is a
# model_wrapper_cfg, which is needed on CPUs (device_ids=None); and broadcast_buffers, which the Runner switches off, is on.
#
# Seen:
#   find_unused_parameters=False broadcast_buffers=True
#
# Exits with 0 if it is so, with 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet torch==2.15.0 mmengine==0.10.7 setuptools
cat > "$folder/options.py" <<'EOF'
import os

import torch.distributed as dist
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mode="loss"):
        return {"loss": self.used(x).square().mean()}


dist.init_process_group("gloo")
runner = Runner(
    model=Net(),
    work_dir=os.environ["WORK_DIR"],
    launcher="pytorch",
    log_level="ERROR",
    cfg=Config(
        {
            "find_unused_parameters": True,
            "model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None},
        }
    ),
)
ddp = runner.model
if dist.get_rank() == 0:
    print(f"find_unused_parameters={ddp.find_unused_parameters} broadcast_buffers={ddp.broadcast_buffers}")
assert not ddp.find_unused_parameters and ddp.broadcast_buffers, "changed"
dist.destroy_process_group()
EOF
WORK_DIR=$folder/work "$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$folder/options.py" \
  2> "$folder/err" || { cat "$folder/err"; exit 1; }
