#!/usr/bin/env bash
# Shows what DeAR gains on a slow network: two processes train on real images, over a link that is slowed down.
# Ends with a table and a picture; exits non-zero if one bit of the models differs.
# Extra arguments go to scripts/demo.py: ./scripts/demo.sh --model resnet50 --image-size 32
set -euo pipefail
EXTRAS="examples,plot"
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

OUT="$ROOT/runs/demo"
mkdir -p "$OUT"
# One thread a process: they share this machine, and sums are taken in the same order in every run.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

"$PY" -m torch.distributed.run --standalone --nproc-per-node 2 "$ROOT/scripts/demo.py" \
    --timeline "$OUT/timeline.png" --json "$OUT/demo.json" "$@" </dev/null
