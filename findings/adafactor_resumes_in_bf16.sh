#!/usr/bin/env bash
# transformers 5.24.0 with torch 2.15.0: Adafactor keeps the state of bfloat16 parameters in float32, and a resumed run has
# it in bfloat16.
#
# `Optimizer.load_state_dict` casts each tensor of floating point in a parameter's state to the dtype of the parameter. An
# optimizer whose state is wider has to say otherwise, and Adafactor does not. The rest of the run goes on with moments of
# 8 bits, and to other parameters than if it had not been stopped.
#
# Seen: "exp_avg float32, after loading bfloat16; 20 steps later 2% of the parameters differ from those of the run that was
# not resumed".
# Exits 0 while it is so, 1 once they behave otherwise.
# PYTHON (default: python3) must have both, or they are installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch, transformers; assert torch.__version__.startswith("2.15.0"); assert transformers.__version__ == "5.24.0"' \
    2>/dev/null || "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 transformers==5.24.0 numpy
PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore "$py" - <<'PY'
import copy

import torch
import transformers
from transformers.optimization import Adafactor

draw = torch.Generator().manual_seed(0)


def optimizer_of(parameter):
    return Adafactor([parameter], lr=1e-2, relative_step=False, scale_parameter=False, beta1=0.9)


def train(optimizer, gradients):
    [parameter] = optimizer.param_groups[0]["params"]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return optimizer.state[parameter]


def gradients(steps):
    return [torch.randn(64, 64, generator=draw).bfloat16() for _ in range(steps)]


parameter = torch.nn.Parameter(torch.randn(64, 64, generator=draw).bfloat16())
optimizer = optimizer_of(parameter)
before = train(optimizer, gradients(5))["exp_avg"].dtype
again = torch.nn.Parameter(parameter.detach().clone())
resumed = optimizer_of(again)
resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
after = resumed.state[again]["exp_avg"].dtype
rest = gradients(20)
train(optimizer, rest)
train(resumed, rest)
share = (parameter != again).float().mean().item()
print(
    f"torch {torch.__version__}, transformers {transformers.__version__}: exp_avg {str(before)[6:]}, after loading "
    f"{str(after)[6:]}; 20 steps later {share:.0%} of the parameters differ from those of the run that was not resumed"
)
raise SystemExit(not (before == torch.float32 and after == torch.bfloat16 and share > 0.005))
PY
