#!/usr/bin/env bash
# pytorch_optimizer 4.1.0 under plain DDP (2 ranks, gloo): with Magma, ranks that seed themselves apart end with different
# models, and nothing says so.
#
# Magma draws its masks in step(), by torch.bernoulli, from torch's global generator of each rank. A script whose ranks
# differ in their seeds, as for dropout and augmentation, gives each rank masks of its own, although all have the same
# gradients: DDP synchronizes gradients only, so the replicas drift. The base optimizer alone, AdamW, keeps them alike.
#
# Seen with torch 2.15.0 on CPUs: "ranks are apart by 0.000 (AdamW), 0.320 (Magma around AdamW)".
# Exits 0 while it is so, 1 once the package behaves otherwise.
# PYTHON (default: python3) must have torch, or torch is installed too.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
packages=(pytorch_optimizer==4.1.0)
"$py" -c 'import torch' 2>/dev/null || "$py" -m pip install -q --target "$folder" torch==2.15.0 numpy
"$py" -m pip install -q --disable-pip-version-check --no-deps --target "$folder" "${packages[@]}"
cat >"$folder/drift.py" <<'PY'
import os

import torch
import torch.distributed as dist
from pytorch_optimizer import Magma
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def apart(make):
    """How far the ranks' models are from each other, over how far they have moved, after 20 steps."""
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24)))
    before = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    optimizer = make(ddp.parameters())
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(20):
        x = torch.randn(8, 24)
        optimizer.zero_grad()
        (ddp(x) - x).square().mean().backward()
        optimizer.step()
    after = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    other = after.clone()
    dist.broadcast(other, 0)
    furthest = (after - other).norm() / (after - before).norm()
    dist.all_reduce(furthest, dist.ReduceOp.MAX)
    return furthest.item()


os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.set_num_threads(1)
dist.init_process_group("gloo")
plain, magma = apart(lambda p: torch.optim.AdamW(p, lr=1e-3)), apart(lambda p: Magma(torch.optim.AdamW(p, lr=1e-3)))
if dist.get_rank() == 0:
    print(f"torch {torch.__version__}: ranks are apart by {plain:.3f} (AdamW), {magma:.3f} (Magma around AdamW)")
dist.barrier()
dist.destroy_process_group()
raise SystemExit(not (plain == 0.0 and magma > 0.05))
PY
PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore "$py" -m torch.distributed.run \
    --standalone --nproc-per-node 2 "$folder/drift.py"
