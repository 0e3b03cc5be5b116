# Sourced by the launch scripts: a virtual environment with the project and the given extras.
#
#   source launch/setup.sh EXTRAS     EXTRAS: "" (core), "sglang", "sglang,dev,bench" ...
#
# COLOCATE_VENV names the environment (default: .venv in the repository). What is installed is recorded as a hash of
# pyproject.toml and the repository's place, and the extras, so that a second start takes no time and a changed pin is
# installed. Only one such hash is ever recorded: an environment imports the project from one place.

die() { printf 'error: %s\n' "$*" >&2; exit 2; }

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3; do
        command -v "$candidate" >/dev/null || continue
        "$candidate" - <<'PY' 2>/dev/null && { command -v "$candidate"; return; }
import sys, venv, ensurepip
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PY
    done
    die "no python3.11 to python3.13 with the venv module found; on Debian: apt-get install python3.11 python3.11-venv"
}

install_project() {
    local extras=$1 python state stamp
    VENV=${COLOCATE_VENV:-$ROOT/.venv}
    state=$({ cat "$ROOT/pyproject.toml"; echo "$ROOT"; } | sha256sum | cut -c1-16)
    stamp=$VENV/.installed-$state-${extras:-core}
    [ -e "$stamp" ] && return
    [ -x "$VENV/bin/python" ] || { python=$(find_python) || exit 2; "$python" -m venv "$VENV"; }
    find "$VENV" -maxdepth 1 -name '.installed-*' ! -name ".installed-$state-*" -delete
    echo "installing into $VENV (once; the log is $VENV/install.log)" >&2
    {
        "$VENV/bin/python" -m pip install -q uv "setuptools>=77"
        UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} "$VENV/bin/uv" pip install \
            --python "$VENV/bin/python" --no-build-isolation -e "$ROOT${extras:+[$extras]}"
    } >"$VENV/install.log" 2>&1 || { tail -n 20 "$VENV/install.log" >&2; die "the installation failed"; }
    touch "$stamp"
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
install_project "${1:-}"
PATH=$VENV/bin:$PATH
cd "$ROOT"
