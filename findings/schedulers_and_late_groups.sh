#!/usr/bin/env bash
# torch 2.15.0: what a learning-rate scheduler makes of a param group that is added to its optimizer in the middle of the
# schedule, as when layers thaw one after the other.
#
# The documentation of `add_param_group` names this use. Some schedulers follow (StepLR, ExponentialLR, CosineAnnealingLR),
# some end the next `step()` with an error that names no group (LambdaLR, OneCycleLR, CyclicLR,
# CosineAnnealingWarmRestarts), and LinearLR, the usual warm-up, silently trains the new group with up to three times the
# rate it was given: it multiplies by the quotient of its factors, and so counts on the rate having been reduced.
#
# Seen, with lr=1 and a group added after one step of a warm-up over five: "LinearLR ends with rates 1.00 and 2.14; errors:
# LambdaLR ValueError, OneCycleLR KeyError, CyclicLR ValueError, CosineAnnealingWarmRestarts ValueError".
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
from torch.optim import lr_scheduler as s


def rates(make):
    """Rates of the old and the new group at the end of five steps, or the name of the error."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
    scheduler = make(optimizer)
    for step in range(5):
        if step == 1:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 1.0})
        optimizer.step()
        try:
            scheduler.step()
        except Exception as error:
            return type(error).__name__
    return [group["lr"] for group in optimizer.param_groups]


kinds = {
    s.LambdaLR: lambda o: s.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)),
    s.OneCycleLR: lambda o: s.OneCycleLR(o, 1.0, total_steps=20),
    s.CyclicLR: lambda o: s.CyclicLR(o, 0.1, 1.0, 5),
    s.CosineAnnealingWarmRestarts: lambda o: s.CosineAnnealingWarmRestarts(o, 5),
    s.StepLR: lambda o: s.StepLR(o, 1, 0.5),
    s.ExponentialLR: lambda o: s.ExponentialLR(o, 0.5),
    s.CosineAnnealingLR: lambda o: s.CosineAnnealingLR(o, 10),
}
found = {kind.__name__: rates(make) for kind, make in kinds.items()}
errors = {name: error for name, error in found.items() if isinstance(error, str)}
old, new = rates(lambda o: s.LinearLR(o, start_factor=1 / 3, total_iters=5))
print(
    f"torch {torch.__version__}: LinearLR ends with rates {old:.2f} and {new:.2f}; errors: "
    + ", ".join(f"{name} {error}" for name, error in errors.items())
)
names = ["LambdaLR", "OneCycleLR", "CyclicLR", "CosineAnnealingWarmRestarts"]
raise SystemExit(not (abs(old - 1) < 1e-6 and new > 2 and list(errors) == names))
PY
