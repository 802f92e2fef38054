#!/usr/bin/env bash
# torch 2.15.0: `SGD(momentum=..., fused=True)` under a GradScaler trains with whatever was in memory, if the first step
# overflows.
#
# Scalers begin with a scale that is too large on purpose, so that a first step with infinite gradients is nothing unusual.
# A GradScaler leaves it to fused optimizers to skip such a step. SGD's momentum buffer is allocated before, without being
# filled, the kernel returns without writing to it, and the next step takes it for the momentum of the one before. Adam,
# AdamW and Adagrad begin with zeros, and SGD without fused has no buffer yet.
#
# And a parameter that gets its first gradient later than others of its group, as a layer that thaws, ends the step with a
# TypeError: buffers are made only where no parameter has one.
#
# Seen, with 1000 parameters that begin at 1, a gradient of 1, lr=0.1 and freed memory that held a million: "behind the
# second step the for-loop has 0.9 in all, fused in 0, and -9e+04 in most; Adam, AdamW and Adagrad as their for-loop. A
# first gradient in the second step: TypeError". How many are hit depends on the memory.
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


def trained(kind, **settings):
    """Parameters behind a step that overflows and one that does not."""
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = kind([parameter], lr=0.1, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for slope in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((parameter * slope).sum()).backward()
        used = [torch.full((1000,), 1e6) for _ in range(64)]  # as a script has used memory before
        del used
        scaler.step(optimizer)
        scaler.update()
    return parameter.detach()


def error_with_a_late_gradient(**settings):
    """The name of the error in a step in which one of two parameters has its first gradient; empty without one."""
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **settings)
    try:
        for having in (parameters[:1], parameters):
            for parameter in having:
                parameter.grad = torch.ones(4)
            optimizer.step()
    except Exception as error:
        return type(error).__name__
    return ""


sgd = torch.optim.SGD
usual, fused = trained(sgd, momentum=0.9), trained(sgd, momentum=0.9, fused=True)
others = [
    torch.allclose(trained(kind), trained(kind, fused=True))
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
]
far = ~torch.isclose(fused, usual)
print(
    f"torch {torch.__version__}: behind the second step the for-loop has {usual[0]:g} in all, fused in {int((~far).sum())}, "
    f"and {fused.median():.1g} in most; Adam, AdamW and Adagrad {'' if all(others) else 'not '}as their for-loop. "
    f"A first gradient in the second step: {error_with_a_late_gradient(fused=True)}"
)
is_late = (error_with_a_late_gradient(fused=True), error_with_a_late_gradient()) == ("TypeError", "")
raise SystemExit(not (torch.allclose(usual, torch.full((1000,), 0.9)) and far.any() and all(others) and is_late))
PY
