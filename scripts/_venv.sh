# Sourced by demo.sh, test.sh and .ci/run: sets ROOT and PY, and makes the virtual environment if need be.
#
# The environment is in the repository root: `.venv` with all that the tests need, or what EXTRAS names in `.venv-demo`,
# unless `.venv` is there. It is complete when its stamp matches: the stamp is written last and holds a hash of all that
# the environment depends on. One that is half made, out of date or moved is made again from scratch, but never one that
# these scripts did not make.
#
#   PYTHON=...   the interpreter to use, where the search below finds the wrong one
#   DDP_CROSSOVER_TORCH=...   a version of torch, which gets an environment of its own (see torch_matrix.sh)
#   pip's and uv's own settings (PIP_INDEX_URL, PIP_CACHE_DIR, UV_DEFAULT_INDEX, HTTPS_PROXY, ...) are honoured

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv${DDP_CROSSOVER_TORCH:+-torch-$DDP_CROSSOVER_TORCH}"
EXTRAS="${EXTRAS:-test}"
CPU_INDEX="https://download.pytorch.org/whl/cpu"

use_venv() {
    VENV="$1"
    PY="$VENV/bin/python"
    MARKER="$VENV/.made-by-ddp-crossover"
    STAMP="$VENV/.complete"
}
use_venv "$VENV"

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
import hashlib, json, pathlib, sys, tomllib
root = pathlib.Path(sys.argv[1])
settings = tomllib.loads((root / "pyproject.toml").read_text())
names = ("requires-python", "dependencies", "optional-dependencies", "scripts")
needs = [settings["build-system"], *(settings["project"].get(name) for name in names)]
parts = [json.dumps(needs, sort_keys=True), sys.version, str(root)]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PYTHON
}

is_complete() { [ -x "$PY" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$1" ] && "$PY" -c '' 2>/dev/null; }

# What pyproject.toml says of torch.
torch_needed() { sed -nE 's/^ *"(torch>=[^"]*)",?.*$/\1/p' "$ROOT/pyproject.toml"; }

# Print the site-packages of an interpreter that has a torch which fits; fail if it has none. A torch for CPUs must have
# its torchvision beside it: that of PyPI is for CUDA, and does not load with it.
torch_of() {
    "$1" - "$(torch_needed)" <<'PYTHON' 2>/dev/null
import importlib.metadata, re, sys
least, limit = (tuple(map(int, number.split("."))) for number in re.findall(r"\d+\.\d+", sys.argv[1]))
torch = importlib.metadata.distribution("torch")
if not least <= tuple(map(int, torch.version.split(".")[:2])) < limit:
    sys.exit(1)
if "+cpu" in torch.version:
    importlib.metadata.distribution("torchvision")
print(torch.locate_file(""))
PYTHON
}

is_reached() {
    "$PY" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1] + "/torch/", timeout=10)' "$CPU_INDEX" 2>/dev/null
}

# Show the packages whose names come in, one a line, in a single line: on a terminal, the one that is fetched now.
in_one_line() {
    local package count=0
    while read -r package; do
        count=$((count + 1))
        if [ -t 1 ]; then printf '\r\033[K    packages: %d, now %s' "$count" "$package"; fi
    done
    if [ -t 1 ]; then printf '\r\033[K'; fi
    if [ "$count" -gt 0 ]; then echo "    packages: $count"; fi
}

# Install what the arguments name, and tell how many packages that are. All that pip says goes to a log.
install() {
    local log tool
    log="$(mktemp)"
    tool=("$PY" -m pip install --disable-pip-version-check --no-input --progress-bar off)
    if [ -z "$HAS_TORCH" ] && command -v uv >/dev/null 2>&1; then  # uv does not see packages that a .pth file adds
        tool=(uv pip install --python "$PY")
    fi
    # pip names a package when it fetches it, uv when it is installed.
    "${tool[@]}" "$@" </dev/null 2>&1 | tee "$log" | sed -unE \
        -e 's/^ *(Downloading|Using cached) ([^ ]*\/)?([^ \/-]+-[^ \/-]+)-[^ ]*\.whl( .*)?$/\3\4/p' \
        -e 's/^ \+ ([^ ]+).*$/\1/p' | in_one_line
    if [ "${PIPESTATUS[0]}" -ne 0 ]; then
        tail -n 15 "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

install_torch() {
    if is_reached; then
        echo "==> installing torch for the CPU from PyTorch's own index (about 200 MB)"
        install --index-url "$CPU_INDEX" "$(torch_needed)" torchvision && return
    fi
    echo "==> PyTorch's own index is of no use here: torch comes from PyPI, on Linux with CUDA, which takes 6 GB of the disk"
}

make_venv() {
    local python wanted packages torch="${DDP_CROSSOVER_TORCH:+torch==$DDP_CROSSOVER_TORCH}"
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
    HAS_TORCH=""
    if [ "$EXTRAS" != test ]; then
        if packages="$(torch_of "$python")"; then
            HAS_TORCH=yes
            echo "==> taking torch and what else is there from $packages"
            echo "$packages" >"$("$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
            # Not another one, for the sake of a newer torchvision.
            torch="$("$PY" -c 'from importlib.metadata import version; print("torch==" + version("torch"))')"
        else
            install_torch
        fi
    fi
    echo "==> installing ddp_crossover and what it needs"
    install --editable "$ROOT[$EXTRAS]" ${torch:+"$torch"} ||
        die "the dependencies could not be installed; the lines above say which and why." \
            "Without a network, or behind a proxy or a mirror, set HTTPS_PROXY or PIP_INDEX_URL." \
            "If the disk is full: about 10 GB are needed. Then run this again, it starts from where it can."
    printf '%s\n' "$wanted" >"$STAMP"
}

# The tests' environment has all that the demo needs.
if [ "$EXTRAS" != test ]; then
    if is_complete "$(fingerprint "$PY" 2>/dev/null)"; then return 0; fi
    use_venv "$VENV-demo"
fi

# Two scripts started at once must not build over one another. macOS has no flock; there they may.
if command -v flock >/dev/null 2>&1; then
    (flock 9; make_venv 9>&-) 9>"$VENV.lock" || exit 1
else
    (make_venv) || exit 1
fi
