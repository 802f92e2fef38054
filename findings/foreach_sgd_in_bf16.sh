#!/usr/bin/env bash
# torch 2.15.0 on CPUs: SGD with momentum trains bfloat16 parameters to other bits with foreach=True than without it.
#
# The documentation calls the two equal but for speed. In 32 and 64 bits they are, to the last bit. In bfloat16
# `torch._foreach_mul_(tensors, 0.9)` rounds 0.9 to bfloat16 before it multiplies; `Tensor.mul_(0.9)`, `tensor * 0.9` and
# even `torch._foreach_mul(tensors, 0.9)`, which is not in place, do not. So momentum is 0.8984375 there, not 0.9.
#
# Seen: "float32: equal; bfloat16: 32% of mul_ differ, and parameters after 20 steps".
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

torch.set_num_threads(1)


def trained(dtype, foreach):
    draw = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(1000, generator=draw).to(dtype))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, foreach=foreach)
    for _ in range(20):
        parameter.grad = torch.randn(1000, generator=draw).to(dtype)
        optimizer.step()
    return parameter.detach()


differ = {dtype: not torch.equal(trained(dtype, False), trained(dtype, True)) for dtype in (torch.float32, torch.bfloat16)}
values = torch.linspace(-3, 3, 4096).to(torch.bfloat16)
in_place, [out_of_place] = [values.clone()], torch._foreach_mul([values], 0.9)
torch._foreach_mul_(in_place, 0.9)
alone = values.clone().mul_(0.9)
rounded = values.clone().mul_(torch.tensor(0.9, dtype=torch.bfloat16))
share = (alone != in_place[0]).float().mean().item()
print(
    f"torch {torch.__version__}: float32: {'not equal' if differ[torch.float32] else 'equal'}; bfloat16: {share:.0%} of "
    f"mul_ differ, and parameters after 20 steps{'' if differ[torch.bfloat16] else ' do not'}"
)
as_seen = share > 0.1 and torch.equal(out_of_place, alone) and torch.equal(in_place[0], rounded)
raise SystemExit(not (as_seen and differ == {torch.float32: False, torch.bfloat16: True}))
PY
