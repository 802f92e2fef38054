#!/usr/bin/env bash
# torch 2.15.0: asking for a checkpoint before the first step changes the training that follows, and all but stops Rprop's.
#
# `torch.distributed.checkpoint.state_dict.get_state_dict` calls `optimizer.step()` with gradients of zero and a learning
# rate of zero, if the optimizer has no state yet. So a script that saves its start, or loads into a fresh optimizer what
# turns out not to be there, trains otherwise than one that does not: Adam's first real step has the bias corrections of
# its second, and Rprop takes the rate of zero as the size of its first steps, which then has to grow from 1e-6. The
# documentation says that these functions only return states. https://github.com/pytorch/pytorch/issues/164929 tells of
# AdamW.
#
# Seen: "steps that Adam has counted: 1 before training; its first step is 0.74 as long; Rprop's first ten steps take it
# 1.0e-05 of the way".
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
from torch.distributed.checkpoint.state_dict import get_state_dict


def trained(kind, steps, asked):
    """How far the weights are from where they began, and the optimizer's state before the first step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = kind(model.parameters(), lr=0.1)
    start = model.weight.detach().clone()
    if asked:
        get_state_dict(model, optimizer)
    before = {name: float(value.max()) for state in optimizer.state.values() for name, value in state.items()}
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
    return float((model.weight - start).norm()), before


adam, (adam_asked, state) = trained(torch.optim.Adam, 1, False)[0], trained(torch.optim.Adam, 1, True)
rprop, rprop_asked = (trained(torch.optim.Rprop, 10, asked)[0] for asked in (False, True))
print(
    f"torch {torch.__version__}: steps that Adam has counted: {state.get('step', 0):.0f} before training; its first step is "
    f"{adam_asked / adam:.2f} as long; Rprop's first ten steps take it {rprop_asked / rprop:.1e} of the way"
)
raise SystemExit(not (state.get("step") == 1 and adam_asked < 0.9 * adam and rprop_asked < 0.01 * rprop))
PY
