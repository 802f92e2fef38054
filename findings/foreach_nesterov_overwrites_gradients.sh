#!/usr/bin/env bash
# torch 2.15.0: `SGD(momentum=..., nesterov=True, foreach=True)` leaves its search direction in `.grad`.
#
# `foreach=True` is the default on GPUs. With weight decay, with maximize, without Nesterov, without foreach, and with
# fused=True `.grad` stays as it was, and no other optimizer of torch writes to it in any of these ways. A script that
# logs the norm of gradients behind `step()`, or that goes on adding to gradients which it has not zeroed, gets other
# numbers on a GPU than on a CPU, and other ones again with weight_decay=0.
#
# Seen, for a gradient of 1 behind two steps of momentum 0.9: "foreach 2.71; for-loop 1, fused 1, foreach with weight decay
# 1, foreach with maximize 1, foreach without nesterov 1".
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


def gradient_after_steps(**settings):
    """What two steps with a gradient of 1 leave of the second one."""
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], **{"lr": 0.1, "momentum": 0.9, "nesterov": True} | settings)
    for _ in range(2):
        parameter.grad = torch.ones(())
        optimizer.step()
    return parameter.grad.item()


found = {
    "foreach": gradient_after_steps(foreach=True),
    "for-loop": gradient_after_steps(foreach=False),
    "fused": gradient_after_steps(fused=True),
    "foreach with weight decay": gradient_after_steps(foreach=True, weight_decay=0.01),
    "foreach with maximize": gradient_after_steps(foreach=True, maximize=True),
    "foreach without nesterov": gradient_after_steps(foreach=True, nesterov=False),
}
written = found.pop("foreach")
print(f"torch {torch.__version__}: foreach {written:.4g}; " + ", ".join(f"{way} {left:g}" for way, left in found.items()))
raise SystemExit(not (abs(written - 2.71) < 1e-5 and set(found.values()) == {1.0}))
PY
