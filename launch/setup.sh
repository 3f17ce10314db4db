# Sets up the project in a virtual environment; safe to repeat, and quick when nothing has changed.
#
#   bash launch/setup.sh      set up and stop
#   source launch/setup.sh    in a script: set up and leave $root (this checkout), $venv and $python (in $venv) to it
#
# A torch that the environment already has is kept. Variables:
#   CP_ENGINE_VENV          the environment's folder (default: .venv in this checkout)
#   CP_ENGINE_SYSTEM_TORCH  1: a new environment sees the system Python's packages, its torch among them
#   CP_ENGINE_TORCH         requirement to install where there is no torch (default: torch==2.13.0)
#   CP_ENGINE_TORCH_INDEX   package index to install torch from (default: pip's own)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${CP_ENGINE_VENV:-$root/.venv}"
python="$venv/bin/python"

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: Python 3.11 or newer is needed and none is on the PATH" >&2
    return 1
}

torch_version() {
    "$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

# What the installation depends on: when it is unchanged there is nothing to do.
stamp_now() {
    echo "$root torch $(torch_version)"
    cksum < "$root/pyproject.toml"
    cksum < "$root/launch/setup.sh"
}

install_torch() {
    local requirement="${CP_ENGINE_TORCH:-torch==2.13.0}"
    if [[ -n "${CP_ENGINE_TORCH_INDEX:-}" ]]; then
        local -x PIP_INDEX_URL="$CP_ENGINE_TORCH_INDEX"
    fi
    echo "setup: installing $requirement (minutes, on a slow line)"
    "$python" -m pip install --quiet "$requirement"
}

install_project() {
    local constraint
    constraint="$(mktemp)"
    # No dependency may replace the torch that is there; pip then says which one wants another.
    echo "torch==$(torch_version)" > "$constraint"
    echo "setup: installing cp_engine and what it needs beside torch $(torch_version)"
    "$python" -m pip install --quiet --constraint "$constraint" --editable "$root[test]"
    rm "$constraint"
}

if [[ ! -x "$python" ]]; then
    echo "setup: creating the virtual environment $venv"
    options=()
    if [[ "${CP_ENGINE_SYSTEM_TORCH:-0}" == 1 ]]; then
        options=(--system-site-packages)
    fi
    "$(find_python)" -m venv ${options[@]+"${options[@]}"} "$venv"
fi
if [[ -z "$(torch_version)" ]]; then
    install_torch
fi
stamp="$venv/cp_engine.stamp"
if [[ ! -f "$stamp" ]] || [[ "$(stamp_now)" != "$(cat "$stamp")" ]]; then
    install_project
    stamp_now > "$stamp"
fi
echo "setup: ready, torch $(torch_version) in $venv"
