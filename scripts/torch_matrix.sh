#!/usr/bin/env bash
# Runs the quick tests on each supported version of torch, each in an environment of its own (.venv-torch-VERSION).
#
#   ./scripts/torch_matrix.sh                 all of them
#   ./scripts/torch_matrix.sh 2.11.0 2.13.0   these
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

versions=("$@")
[ "${#versions[@]}" -gt 0 ] || versions=(2.11.0 2.12.1 2.13.0 2.14.0 2.15.0)
results=()
failed=0

for version in "${versions[@]}"; do
    echo
    echo "==> torch $version"
    log="$(mktemp)"
    DDP_CROSSOVER_TORCH="$version" ./scripts/test.sh -m quick 2>&1 | tee "$log" || failed=1
    results+=("$version: $(grep -E '[0-9]+ (passed|failed|error)' "$log" | tail -n 1 | tr -d '=')")
    rm -f "$log"
done

echo
printf '%s\n' "${results[@]}"
exit "$failed"
