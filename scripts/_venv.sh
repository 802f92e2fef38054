# Sourced by demo.sh, test.sh and .ci/run: sets ROOT and PY, and makes the virtual environment if need be.
#
# The environment is `.venv` in the repository root. It is complete when its stamp matches: the stamp is
# written last and holds a hash of all that the environment depends on. One that is half made, out of date or
# moved is made again from scratch, but never one that these scripts did not make.
#
#   PYTHON=...   the interpreter to use, where the search below finds the wrong one
#   DDP_CROSSOVER_TORCH=...   a version of torch, which gets an environment of its own (see torch_matrix.sh)
#   pip's own settings (PIP_INDEX_URL, PIP_CACHE_DIR, HTTPS_PROXY, ...) are honoured

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv${DDP_CROSSOVER_TORCH:+-torch-$DDP_CROSSOVER_TORCH}"
PY="$VENV/bin/python"
MARKER="$VENV/.made-by-ddp-crossover"
STAMP="$VENV/.complete"

die() {
    printf '\nerror: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '       %s\n' "$line" >&2; done
    exit 1
}

# Print the first interpreter that is new enough and can make a virtual environment. Candidates are run, not
# just looked up: a version manager's shim may exist for a version that is not there.
find_python() {
    local candidate new_enough=""
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.14 python; do
        [ -n "$candidate" ] || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null </dev/null || {
            [ "$candidate" != "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python 3.11 or newer that runs."
            continue
        }
        new_enough="${new_enough:-$candidate}"
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null </dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    [ -z "$new_enough" ] || die "$new_enough has no venv module, so no virtual environment can be made." \
        "On Debian and Ubuntu it is a package of its own: apt install python3-venv"
    die "Python 3.11 or newer is needed, and none was found on the PATH." \
        "Install one (on Debian and Ubuntu: apt install python3 python3-venv), or name one: PYTHON=/path/to/python $0"
}

# Everything that makes an old environment unusable: other dependencies, another interpreter, another place
# (an editable install points at the repository's absolute path).
fingerprint() {
    "$1" - "$ROOT" <<'PYTHON'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
parts = [(root / "pyproject.toml").read_bytes(), sys.version.encode(), str(root).encode()]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PYTHON
}

is_complete() { [ -x "$PY" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$1" ] && "$PY" -c '' 2>/dev/null; }

make_venv() {
    local python wanted
    # Each failure is taken up by hand: `set -e` is off inside `(make_venv) || exit`.
    python="$(find_python)" || exit 1
    wanted="$(fingerprint "$python")" || die "$python could not read $ROOT/pyproject.toml."
    if is_complete "$wanted"; then return; fi
    if [ -e "$VENV" ] && [ ! -e "$MARKER" ]; then
        die "$VENV exists, but these scripts did not make it, so they leave it alone." \
            "Move it away or delete it, and run this again."
    fi
    echo "==> making the virtual environment $VENV with $("$python" --version)"
    rm -rf "$VENV"
    mkdir -p "$VENV" && touch "$MARKER" || die "$VENV cannot be made; is $ROOT writable?"
    "$python" -m venv "$VENV" || die "$python -m venv failed; what it said stands above."
    echo "==> installing ddp_crossover and its dependencies (with torch some GB: this can take minutes)"
    "$PY" -m pip install --disable-pip-version-check --no-input --editable "$ROOT[examples,test]" \
        ${DDP_CROSSOVER_TORCH:+"torch==$DDP_CROSSOVER_TORCH"} </dev/null ||
        die "pip could not install the dependencies; its last lines above say which and why." \
            "Without a network, or behind a proxy or a mirror, set HTTPS_PROXY or PIP_INDEX_URL." \
            "If the disk is full: about 10 GB are needed. Then run this again, it starts from where it can."
    printf '%s\n' "$wanted" >"$STAMP"
}

# Two scripts started at once must not build over one another. macOS has no flock; there they may.
if command -v flock >/dev/null 2>&1; then
    (flock 9; make_venv 9>&-) 9>"$VENV.lock" || exit 1
else
    (make_venv) || exit 1
fi
