#!/usr/bin/env bash
# W&B 0.31.0 (offline) leaves two daemon threads in the process after run.finish(): "wandb-AsyncioManager-main", which
# runs an asyncio loop, and "wandb-ServiceFinalizer", which waits in a queue.SimpleQueue. So "no other thread is alive"
# is not a state that a process with W&B comes back to. Seen on Python 3.11, Linux. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q wandb==0.31.0
cd "$folder"
WANDB_MODE=offline WANDB_SILENT=true "$folder/venv/bin/python" - <<'PY'
import threading
import wandb

before = {thread.name for thread in threading.enumerate()}
run = wandb.init(project="threads")
run.log({"loss": 1.0})
run.finish()
left = sorted(thread.name for thread in threading.enumerate() if thread.name not in before)
print("after finish():", left)
assert left == ["wandb-AsyncioManager-main", "wandb-ServiceFinalizer"], left
PY
