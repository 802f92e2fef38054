#!/usr/bin/env bash
# torch 2.15.0, gloo: whether a NaN survives `all_reduce(op=MAX)` or `MIN` depends on the rank that has it, and in longer
# tensors on the element.
#
# Scripts ask with such a reduction whether any rank has diverged: the greatest loss, the greatest norm of a gradient. Of
# one element the NaN of rank 0 reaches all ranks, that of rank 1 none, and the answer is the other rank's number. Of
# 1000 elements that are NaN on rank 0, half are left. `torch.maximum` and `torch.amax` keep every NaN. Ranks agree with
# each other, so nothing shows. `all_reduce(tensor.isnan().float())` is the way out.
#
# Seen on two ranks: "MAX: NaN on rank 0 gives nan, on rank 1 gives 1.0; of 1000 NaN on rank 0 500 are left; MIN: nan,
# 1.0, 500; SUM: nan, nan, 1000".
# Exits 0 while it is so, 1 once torch behaves otherwise.
# PYTHON (default: python3) must have this torch, or it is installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch; assert torch.__version__.startswith("2.15.0")' 2>/dev/null ||
    "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 numpy
cat > "$folder/greatest.py" <<'PY'
import math
import sys

import torch
import torch.distributed as dist

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)


def reduced(op, has_nan, elements=1):
    tensor = torch.full((elements,), math.nan if rank == has_nan else 1.0)
    dist.all_reduce(tensor, op=op)
    return tensor


found = {
    name: (reduced(op, 0).item(), reduced(op, 1).item(), int(reduced(op, 0, 1000).isnan().sum()))
    for name, op in (("MAX", dist.ReduceOp.MAX), ("MIN", dist.ReduceOp.MIN), ("SUM", dist.ReduceOp.SUM))
}
dist.destroy_process_group()
if rank == 0:
    of_0, of_1, left = found["MAX"]
    others = "; ".join(f"{name}: {', '.join(map(str, found[name]))}" for name in ("MIN", "SUM"))
    print(f"torch {torch.__version__}: MAX: NaN on rank 0 gives {of_0}, on rank 1 gives {of_1}; of 1000 NaN on rank 0 "
          f"{left} are left; {others}")
hidden = [math.isnan(of_0) and of_1 == 1 and left == 500 for of_0, of_1, left in (found["MAX"], found["MIN"])]
of_sum = math.isnan(found["SUM"][0]) and math.isnan(found["SUM"][1]) and found["SUM"][2] == 1000
raise SystemExit(not (all(hidden) and of_sum))
PY
export PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
timeout 120 "$py" "$folder/greatest.py" "$folder/store" 1 &
other=$!
timeout 120 "$py" "$folder/greatest.py" "$folder/store" 0
wait "$other"
