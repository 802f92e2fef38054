#!/usr/bin/env bash
# torch 2.15.0: `PeriodicModelAverager` averages one layer of a rank with another layer of the next, where ranks have not
# used the same layers in their last step.
#
# It leaves out parameters whose `.grad` is None, each rank by itself, puts the others into one flat tensor and reduces
# that. A model of two heads, of which a step uses the one that its samples ask for, has flat tensors of equal length on
# all ranks, and head "a" of rank 0 gets the mean of itself and head "b" of rank 1. There is no error and no warning. (If
# no parameter has a gradient, as after `zero_grad()`, it is a ValueError of `torch.cat`.)
#
# Seen on two ranks, with weights of a 1 and 3 and of b 10 and 30 on ranks 0 and 1, where rank 0 used a and rank 1 used b:
# "a is 15.5 on rank 0 and 3.0 on rank 1, b is 10.0 and 15.5; all that have gradients on both: a 2.0 and 2.0, b 20.0 and
# 20.0".
# Exits 0 while it is so, 1 once torch behaves otherwise.
# PYTHON (default: python3) must have this torch, or it is installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch; assert torch.__version__.startswith("2.15.0")' 2>/dev/null ||
    "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 numpy
cat > "$folder/heads.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)


def averaged(used):
    """The weights of both heads on both ranks, after an average behind a step that has used some heads."""
    heads = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.0)
    with torch.no_grad():
        heads["a"].weight.fill_((1.0, 3.0)[rank])
        heads["b"].weight.fill_((10.0, 30.0)[rank])
    sum(heads[name](torch.ones(1, 1)).sum() for name in used).backward()
    optimizer.step()
    PeriodicModelAverager(period=1, warmup_steps=0).average_parameters(heads.parameters())
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, {name: head.weight.item() for name, head in heads.items()})
    return {name: tuple(one[name] for one in of_ranks) for name in heads}


apart, alike = averaged("ab"[rank]), averaged("ab")
dist.destroy_process_group()
if rank == 0:
    (a0, a1), (b0, b1) = apart["a"], apart["b"]
    print(f"torch {torch.__version__}: a is {a0} on rank 0 and {a1} on rank 1, b is {b0} and {b1}; all that have gradients "
          f"on both: a {alike['a'][0]} and {alike['a'][1]}, b {alike['b'][0]} and {alike['b'][1]}")
mixed = {"a": (15.5, 3.0), "b": (10.0, 15.5)}
raise SystemExit(not (apart == mixed and alike == {"a": (2.0, 2.0), "b": (20.0, 20.0)}))
PY
export PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
timeout 120 "$py" "$folder/heads.py" "$folder/store" 1 &
other=$!
timeout 120 "$py" "$folder/heads.py" "$folder/store" 0
wait "$other"
