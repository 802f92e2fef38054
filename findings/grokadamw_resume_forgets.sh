#!/usr/bin/env bash
# grokadamw 0.1.2 under plain DDP (2 ranks, gloo): a run that is resumed from its checkpoint goes on as if it had none.
#
# GrokAdamW keeps its moments in param_groups[i]["state"], by parameter, and not in optimizer.state. state_dict() carries
# them, under the tensors of the run that has ended; load_state_dict() raises nothing, but no parameter of the new run is
# one of those, so step counts and moments begin anew. torch.optim.AdamW, in the same script, goes on to the last bit.
#
# Seen with torch 2.15.0 on CPUs: "resumed runs are off by 0.000 (AdamW), 0.517 (GrokAdamW)".
# Exits 0 while it is so, 1 once the package behaves otherwise.
# PYTHON (default: python3) must have torch, or torch is installed too.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
packages=(grokadamw==0.1.2)
"$py" -c 'import torch' 2>/dev/null || "$py" -m pip install -q --target "$folder" torch==2.15.0 numpy
"$py" -m pip install -q --disable-pip-version-check --no-deps --target "$folder" "${packages[@]}"
cat >"$folder/resume.py" <<'PY'
import io
import os

import torch
import torch.distributed as dist
from grokadamw import GrokAdamW
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def start(make, checkpoint=None):
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24)))
    optimizer = make(ddp.parameters())
    if checkpoint is not None:
        model, state = torch.load(io.BytesIO(checkpoint), weights_only=False)
        ddp.load_state_dict(model)
        optimizer.load_state_dict(state)
    return ddp, optimizer


def train(ddp, optimizer, steps):
    for step in steps:
        draw = torch.Generator().manual_seed(2 * step + dist.get_rank())
        x = torch.randn(8, 24, generator=draw)
        optimizer.zero_grad()
        (ddp(x) - x).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def off(make):
    """How far a resumed run ends from one that went on, over how far that one has moved since."""
    ddp, optimizer = start(make)
    before = train(ddp, optimizer, range(10)).clone()
    file = io.BytesIO()
    torch.save((ddp.state_dict(), optimizer.state_dict()), file)
    went_on = train(ddp, optimizer, range(10, 20))
    resumed = train(*start(make, file.getvalue()), range(10, 20))
    return ((resumed - went_on).norm() / (went_on - before).norm()).item()


os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.set_num_threads(1)
dist.init_process_group("gloo")
plain, grok = off(lambda p: torch.optim.AdamW(p, lr=1e-3)), off(lambda p: GrokAdamW(p, lr=1e-3))
if dist.get_rank() == 0:
    print(f"torch {torch.__version__}: resumed runs are off by {plain:.3f} (AdamW), {grok:.3f} (GrokAdamW)")
dist.barrier()
dist.destroy_process_group()
raise SystemExit(not (plain == 0.0 and grok > 0.05))
PY
PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore "$py" -m torch.distributed.run \
    --standalone --nproc-per-node 2 "$folder/resume.py"
