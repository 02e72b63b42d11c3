# Sourced by launch/quickstart.sh and tests/run.sh: finds a Python >= 3.12, makes .venv, installs.
# Installs nothing if pyproject.toml and constraints.txt are unchanged since the last start.

pulse_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Without cached bytecode every rank would compile thousands of modules at its start.
unset PYTHONDONTWRITEBYTECODE

pulse_python_is_new_enough() {
    "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

pulse_find_python() {
    local candidate
    for candidate in python3 python3.12 python3.13 python3.14 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.{12,13,14}*/bin/python; do
        if command -v "$candidate" >/dev/null 2>&1 && pulse_python_is_new_enough "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    if command -v uv >/dev/null 2>&1; then
        uv python find '>=3.12' 2>/dev/null && return 0
    fi
    return 1
}

# pulse_setup [EXTRA]: makes .venv with the package and an optional extra such as "dev".
pulse_setup() {
    local extra=${1:-} python stamp wanted
    stamp="$pulse_root/.venv/.installed${extra:+-$extra}"
    wanted=$(cat "$pulse_root/pyproject.toml" "$pulse_root/constraints.txt" | cksum)
    # Without an extra, any existing installation suffices.
    if [ -n "$extra" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] ||
        [ -z "$extra" ] && grep -qsFx "$wanted" "$stamp"*; then
        return 0
    fi
    if ! [ -x "$pulse_root/.venv/bin/python" ]; then
        if ! python=$(pulse_find_python); then
            echo "megatron-pulse needs Python 3.12 or newer, and none was found on PATH, among" \
                "pyenv's versions, or by uv: install one (for example: pyenv install 3.12)." >&2
            return 1
        fi
        echo "Setting up .venv with $("$python" --version) ..."
        "$python" -m venv "$pulse_root/.venv"
    fi
    if ! "$pulse_root/.venv/bin/python" -m pip --version >/dev/null 2>&1; then
        "$pulse_root/.venv/bin/python" -m ensurepip >/dev/null # a venv made by uv has no pip
    fi
    "$pulse_root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
    "$pulse_root/.venv/bin/uv" pip install --quiet --python "$pulse_root/.venv/bin/python" \
        --constraint "$pulse_root/constraints.txt" \
        --editable "$pulse_root${extra:+[$extra]}"
    echo "$wanted" >"$stamp"
}
