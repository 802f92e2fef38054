#!/usr/bin/env bash
# Trains the same model on real images from the same seed, once with plain DDP and once with DeAR, on two
# processes, and prints both side by side. Exits non-zero if their parameters differ by one bit.
# Extra arguments go to scripts/train.py: ./scripts/demo.sh --epochs 2 --optimizer sgd
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

OUT="$ROOT/runs/demo"
mkdir -p "$OUT"
# One thread a rank: two ranks share this machine, and sums are taken in the same order in both runs.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

for hook in none dear; do
    echo
    echo "==> training with --hook $hook on 2 processes"
    "$PY" -m torch.distributed.run --standalone --nproc-per-node 2 "$ROOT/scripts/train.py" \
        --model resnet18 --epochs 5 "$@" \
        --hook "$hook" --json "$OUT/$hook.json" --save-params "$OUT/$hook.pt" </dev/null
done

echo
"$PY" "$ROOT/scripts/compare_runs.py" "$OUT/none" "$OUT/dear" --json "$OUT/comparison.json"
