#!/usr/bin/env bash
# Runs the tests. Arguments go to pytest: ./scripts/test.sh tests/test_train_script.py -k resume
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

# From the root, so that pytest finds its settings; paths in arguments are relative to it, too.
cd "$ROOT"
exec "$PY" -m pytest "$@" </dev/null
