#!/usr/bin/env bash
# torch 2.15.0, DistributedDataParallel(static_graph=True): in the first backward every bucket that a communication hook
# gets says index() == 0 and is_last() == False.
#
# From the second backward on indices count up, and the last bucket says so, as without static_graph. A hook that keeps
# something by bucket, or that ends its work with the last one, takes the first backward for many that broke off.
#
# Seen with two buckets, one for each dtype: "static_graph: [[0, 0], [0, 1]], last [[], [1]]; without: [[0, 1], [0, 1]],
# last [[1], [1]]".
# Exits 0 while it is so, 1 once torch behaves otherwise.
# PYTHON (default: python3) must have this torch, or it is installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch; assert torch.__version__.startswith("2.15.0")' 2>/dev/null ||
    "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 numpy
PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore "$py" - <<'PY'
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class TwoDtypes(nn.Module):
    """Gradients of each dtype get a bucket of their own."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 4), nn.Linear(4, 4).double()

    def forward(self, x):
        return self.wide(self.narrow(x).double())


def seen(static_graph):
    """For each of two backwards: the indices of buckets, and those of them that say that they are the last."""
    ddp = DDP(TwoDtypes(), static_graph=static_graph)
    indices, last = [], []

    def hook(state, bucket):
        indices[-1].append(bucket.index())
        if bucket.is_last():
            last[-1].append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        indices.append([])
        last.append([])
        ddp(torch.randn(2, 4)).sum().backward()
    return indices, last


static, usual = seen(True), seen(False)
print(f"torch {torch.__version__}: static_graph: {static[0]}, last {static[1]}; without: {usual[0]}, last {usual[1]}")
dist.destroy_process_group()
raise SystemExit(not (static == ([[0, 0], [0, 1]], [[], [1]]) and usual == ([[0, 1], [0, 1]], [[1], [1]])))
PY
