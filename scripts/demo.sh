#!/usr/bin/env bash
# Shows what DeAR gains on a slow network: two processes train on real images, over a link that is slowed down.
# A first picture in a minute, the end in two, a table and a picture; exits non-zero if one bit of the models differs.
# Extra arguments go to scripts/demo.py: ./scripts/demo.sh --model resnet50 --image-size 32
set -euo pipefail
EXTRAS="examples,plot"
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

OUT="$ROOT/runs/demo"
mkdir -p "$OUT"
"$PY" "$ROOT/scripts/demo.py" --picture "$OUT/demo.png" --json "$OUT/demo.json" "$@" </dev/null
