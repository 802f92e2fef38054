#!/usr/bin/env bash
# torchao 0.18.0 (torchao.optim.AdamW8bit, AdamW4bit, AdamWFp8): the optimizer's state cannot be copied in memory.
#
# Its moments are tensor subclasses that implement no aten.clone, so `copy.deepcopy(optimizer.state_dict())`, by which
# scripts keep the best weights so far, ends in a NotImplementedError after the first step. `moment.to("cpu", copy=True)`
# returns a tensor that shares its codes with the original, and so follows training. torch.save() works.
#
# Seen with torch 2.15.0 on CPUs: "deepcopy of state_dict() raises NotImplementedError for AdamW8bit, AdamW4bit,
# AdamWFp8; to(copy=True) shares memory for AdamW8bit, AdamW4bit, AdamWFp8" (for torch.optim.AdamW neither).
# Exits 0 while it is so, 1 once the package behaves otherwise.
# PYTHON (default: python3) must have torch, or torch is installed too. Its step is compiled, by a C++ compiler.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch' 2>/dev/null || "$py" -m pip install -q --target "$folder" torch==2.15.0 numpy
"$py" -m pip install -q --disable-pip-version-check --no-deps --target "$folder" torchao==0.18.0
PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore TORCHINDUCTOR_CACHE_DIR="$folder/cache" "$py" - <<'PY'
import copy

import torch
import torchao.optim

ALL = [torch.optim.AdamW, torchao.optim.AdamW8bit, torchao.optim.AdamW4bit, torchao.optim.AdamWFp8]


def trained(cls):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(128, 128))
    optimizer = cls([parameter], lr=1e-3)
    step(optimizer, parameter)
    return optimizer, parameter


def step(optimizer, parameter):
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def raises(cls):
    optimizer, _ = trained(cls)
    try:
        copy.deepcopy(optimizer.state_dict())
    except NotImplementedError:
        return True
    return False


def shares(cls):
    """Whether a copy of a moment changes in the next step."""
    optimizer, parameter = trained(cls)
    copied = optimizer.state[parameter]["exp_avg"].to("cpu", copy=True)
    before = values(copied)
    step(optimizer, parameter)
    return not torch.equal(values(copied), before)


def values(moment):
    return moment.dequantize().clone() if hasattr(moment, "codes") else moment.clone()


raising, sharing = ([cls.__name__ for cls in ALL if has(cls)] for has in (raises, shares))
print(
    f"torch {torch.__version__}: deepcopy of state_dict() raises NotImplementedError for {', '.join(raising)}; "
    f"to(copy=True) shares memory for {', '.join(sharing)}"
)
raise SystemExit(not raising == sharing == [cls.__name__ for cls in ALL[1:]])
PY
