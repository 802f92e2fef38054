#!/usr/bin/env bash
# Runs the tests, three at a time. Arguments go to pytest: ./scripts/test.sh tests/scripts/test_train_script.py -k resume
#
#   ./scripts/test.sh -m quick    the core of every invariant, in two minutes
#   ./scripts/test.sh -m nightly  what a run leaves out: two thirds of the cases on ranks, recipes, benches, soaks
#   ./scripts/test.sh -n 0 ...    one at a time, for --pdb or -s
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

case " $* " in
*" quick "*) echo "==> the quick tests: two minutes on two cores that do nothing else" ;;
*" nightly "*) echo "==> the tests that a run leaves out: an hour or more on two cores that do nothing else" ;;
"  ") echo "==> all tests but the nightly ones: twenty minutes on two cores that do nothing else" ;;
esac

# From the root, so that pytest finds its settings; paths in arguments are relative to it, too.
cd "$ROOT"
# Ranks wait for each other, and for timeouts, a good part of the time: three workers keep two cores busy. Tests of a
# group share what they start, so one worker runs them all; tests/conftest.py says in which order.
exec "$PY" -m pytest -n 3 --dist loadgroup --no-loadscope-reorder "$@" </dev/null
