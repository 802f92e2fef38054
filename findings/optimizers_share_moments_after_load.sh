#!/usr/bin/env bash
# torch 2.15.0: after `b.load_state_dict(a.state_dict())` two optimizers keep their moments in the same memory.
#
# `Module.load_state_dict` copies values into the module's own tensors. `Optimizer.load_state_dict` takes the tensors
# themselves, where dtype and device are right already, and the documentation of neither method says so. A copy of a
# model that trains beside it, a teacher or a second head that is started from the first one's state, then has its Adam
# moments and its number of steps changed by the other optimizer, twice a step. A file in between, or
# `copy.deepcopy(a.state_dict())`, keeps them apart.
#
# Seen: "Adam: exp_avg, exp_avg_sq, step shared; SGD: momentum_buffer shared; a step of a is one of b: 2 steps counted
# after 1; by deepcopy: 1".
# Exits 0 while it is so, 1 once torch behaves otherwise.
# PYTHON (default: python3) must have this torch, or it is installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch; assert torch.__version__.startswith("2.15.0")' 2>/dev/null ||
    "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 numpy
PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore "$py" - <<'PY'
import copy

import torch


def loaded(kind, take=lambda state: state, **settings):
    """An optimizer after a step, and another one that has loaded its state."""
    a, b = (kind([torch.nn.Parameter(torch.ones(3))], lr=0.1, **settings) for _ in range(2))
    step(a)
    b.load_state_dict(take(a.state_dict()))
    return a, b


def step(optimizer):
    [parameter] = optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones(3)
    optimizer.step()


def state(optimizer):
    [own] = optimizer.state.values()
    return own


def shared(a, b):
    return sorted(name for name, value in state(a).items() if value.data_ptr() == state(b)[name].data_ptr())


adam, sgd = loaded(torch.optim.Adam), loaded(torch.optim.SGD, momentum=0.9)
apart = loaded(torch.optim.Adam, copy.deepcopy)
of_adam, of_sgd, of_apart = shared(*adam), shared(*sgd), shared(*apart)
step(adam[0])
step(apart[0])
counted, counted_apart = (int(state(pair[1])["step"]) for pair in (adam, apart))
print(
    f"torch {torch.__version__}: Adam: {', '.join(of_adam)} shared; SGD: {', '.join(of_sgd)} shared; a step of a is one of "
    f"b: {counted} steps counted after 1; by deepcopy: {counted_apart}"
)
as_seen = of_adam == ["exp_avg", "exp_avg_sq", "step"] and of_sgd == ["momentum_buffer"] and not of_apart
raise SystemExit(not (as_seen and (counted, counted_apart) == (2, 1)))
PY
