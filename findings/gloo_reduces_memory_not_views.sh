#!/usr/bin/env bash
# torch 2.15.0, gloo: `all_reduce`, `broadcast` and `reduce` of a tensor that is not dense (a column, a diagonal, every
# second element) work on as many elements of its memory as it has, one after the other, and not on its own.
#
# There is no error. The elements between those of the view are changed, some of its own are not, and each rank is left
# with other values. `all_gather` is right. `tensor.contiguous()` before the call, and a copy back, are the way out.
#
# Seen on two ranks, of which rank r has (r + 1) * [[0, 1], [2, 3], [4, 5]] and reduces column 0, which should become
# 0, 6, 12: "all_reduce: rank 0 [[0, 3], [6, 3], [4, 5]], rank 1 [[0, 3], [6, 6], [8, 10]]; broadcast: rank 1 [[0, 1],
# [2, 6], [8, 10]]".
# Exits 0 while it is so, 1 once torch behaves otherwise.
# PYTHON (default: python3) must have this torch, or it is installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch; assert torch.__version__.startswith("2.15.0")' 2>/dev/null ||
    "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 numpy
cat > "$folder/column.py" <<'PY'
import sys

import torch
import torch.distributed as dist

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)


def of_ranks(collective):
    matrix = torch.arange(6).view(3, 2) * (rank + 1)
    collective(matrix[:, 0])
    seen = [None, None]
    dist.all_gather_object(seen, matrix.tolist())
    return seen


reduced = of_ranks(dist.all_reduce)
_, got = of_ranks(lambda column: dist.broadcast(column, 0))
if rank == 0:
    print(f"torch {torch.__version__}: all_reduce: rank 0 {reduced[0]}, rank 1 {reduced[1]}; broadcast: rank 1 {got}")
dist.destroy_process_group()
as_seen = reduced == [[[0, 3], [6, 3], [4, 5]], [[0, 3], [6, 6], [8, 10]]] and got == [[0, 1], [2, 6], [8, 10]]
raise SystemExit(not as_seen)
PY
export PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
timeout 120 "$py" "$folder/column.py" "$folder/store" 1 &
other=$!
timeout 120 "$py" "$folder/column.py" "$folder/store" 0
wait "$other"
