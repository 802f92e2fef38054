#!/usr/bin/env bash
# torch 2.15.0: `ReduceLROnPlateau` with factor 0.5 divides the learning rate by 8 at a time, if the optimizer has three
# param groups and its rate is a tensor.
#
# A rate that is no group's own is every group's: `Adam(groups, lr=torch.tensor(1e-3))` puts the one tensor into all of
# them. Schedulers write into tensors in place. ReduceLROnPlateau goes through the groups, reads, multiplies, writes, and
# the next group begins from what the last one has left. A list of functions, factors or rates by group (LambdaLR,
# MultiplicativeLR, OneCycleLR, CyclicLR) leaves all groups with the last one's rate. Tensors are what torch's tutorials
# recommend for a compiled `step()`, and groups are how norms and biases go without weight decay. Nothing warns.
#
# With numbers, or with a tensor of its own in each group, rates are right.
#
# Seen, for three groups with rate 1: "ReduceLROnPlateau, two plateaus: 0.25 0.25 0.25, as tensor 0.015625 0.015625
# 0.015625; LambdaLR with 1, 0.1, 0.01: 1 0.1 0.01, as tensor 0.01 0.01 0.01; OneCycleLR: 0.1 0.2 0.3, as tensor 0.3 0.3
# 0.3".
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
from torch.optim import lr_scheduler


def rates(make, steps, lr, *values):
    """The rates of three groups after some steps, of which the optimizer gets one."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(3)]
    optimizer = torch.optim.AdamW(groups, lr=lr, foreach=False)
    scheduler = make(optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*values)
    return [round(float(group["lr"]), 6) for group in optimizer.param_groups]


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def functions(optimizer):
    return lr_scheduler.LambdaLR(optimizer, [lambda _, factor=factor: factor for factor in (1.0, 0.1, 0.01)])


def cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2, 0.3], total_steps=10, pct_start=0.4)


def both(make, steps, *values):
    return [rates(make, steps, lr, *values) for lr in (1.0, torch.tensor(1.0))]


found = {
    "ReduceLROnPlateau, two plateaus": both(plateau, 3, 1.0),
    "LambdaLR with 1, 0.1, 0.01": both(functions, 1),
    "OneCycleLR": both(cycle, 3),
}
print(
    f"torch {torch.__version__}: "
    + "; ".join(
        f"{name}: {' '.join(f'{rate:g}' for rate in number)}, as tensor {' '.join(f'{rate:g}' for rate in tensor)}"
        for name, (number, tensor) in found.items()
    )
)
expected = [
    [[0.25] * 3, [0.5**6] * 3],
    [[1.0, 0.1, 0.01], [0.01] * 3],
    [[0.1, 0.2, 0.3], [0.3] * 3],
]
raise SystemExit(list(found.values()) != expected)
PY
