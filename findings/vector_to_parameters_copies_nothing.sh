#!/usr/bin/env bash
# torch 2.15.0: `torch.nn.utils.vector_to_parameters` leaves all parameters in the memory of the vector.
#
# Its documentation says that it copies slices of a vector into parameters. It sets `parameter.data` to views instead. So
# whoever keeps the vector, as line searches (TRPO) and averages of whole models do, and goes on computing in it, changes
# the model, and training changes the vector. Two models that get one vector are one model from then on. A checkpoint of
# one layer has the size of all.
#
# Seen: "vector zeroed: weights 0.0; after a step of the one model the other has moved, too: True; file of one layer of
# ten: 9.1 times that of a copy".
# Exits 0 while it is so, 1 once torch behaves otherwise.
# PYTHON (default: python3) must have this torch, or it is installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch; assert torch.__version__.startswith("2.15.0")' 2>/dev/null ||
    "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 numpy
PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore "$py" - <<'PY'
import io

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def layers(count):
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(count)))


def saved_bytes(tensors):
    file = io.BytesIO()
    torch.save(tensors, file)
    return len(file.getvalue())


target, online = layers(1), layers(1)
vector = parameters_to_vector(online.parameters()).detach()
vector_to_parameters(vector, online.parameters())
vector_to_parameters(vector, target.parameters())
before = target[0].weight.detach().clone()
online(torch.ones(1, 64)).sum().backward()
torch.optim.SGD(online.parameters(), lr=0.1).step()
moved = not torch.equal(before, target[0].weight)
vector.zero_()
largest = float(online[0].weight.abs().max())

deep = layers(10)
vector_to_parameters(parameters_to_vector(deep.parameters()).detach(), deep.parameters())
state = deep[0].state_dict()
times = saved_bytes(state) / saved_bytes({name: value.clone() for name, value in state.items()})
print(
    f"torch {torch.__version__}: vector zeroed: weights {largest}; after a step of the one model the other has moved, too: "
    f"{moved}; file of one layer of ten: {times:.1f} times that of a copy"
)
raise SystemExit(not (moved and largest == 0.0 and times > 5))
PY
