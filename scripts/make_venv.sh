#!/usr/bin/env bash
# Make .venv with this project in it, from a Python found on this machine. Called by `make`.
#
#   scripts/make_venv.sh [FOLDER]     (default .venv; PYTHON=... names the interpreter to use)
#
# A second run reuses the folder and brings the packages up to date. The newest Python is not the
# best one: megatron-core has wheels for 3.12 and 3.13 only.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
wanted='import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 14))'
version='import platform; print(platform.python_version())'
tried=()
quiet=()

# Whether $1 runs, has venv and fits. A pyenv shim exists for versions that it then refuses to run.
usable() {
    local error
    if ! command -v "$1" >/dev/null; then
        tried+=("$1: not found")
    elif ! error=$("$1" -c "$version" 2>&1); then
        tried+=("$1: does not run ($(head -n 1 <<<"$error"))")
    elif ! "$1" -c "$wanted" >/dev/null 2>&1; then
        tried+=("$1: is $error, or lacks the venv module (python3-venv on Debian and Ubuntu)")
    else
        return 0
    fi
    return 1
}

candidates() {
    printf '%s\n' python3.12 python3.13 python3
    local root=${PYENV_ROOT:-$HOME/.pyenv}
    ls -d "$root"/versions/3.12*/bin/python "$root"/versions/3.13*/bin/python 2>/dev/null | sort -Vr
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" && python=$PYTHON && return 0
        return 1  # somebody asked for this one: no other will do
    fi
    local candidate
    while read -r candidate; do
        usable "$candidate" && python=$candidate && return 0
    done < <(candidates)
    return 1
}

if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c "$wanted" >/dev/null 2>&1; then
    echo "reusing $venv (Python $("$venv/bin/python" -c "$version"))"
    quiet=(--quiet)
else
    if ! find_python; then
        {
            echo "No Python to make $venv with: megatron-core needs 3.12 or 3.13, with venv. Tried:"
            printf '  %s\n' "${tried[@]}"
            echo "Install one (apt install python3.12-venv, or pyenv install 3.12), or name it:"
            echo "  make PYTHON=/path/to/python3.12 ..."
        } >&2
        exit 1
    fi
    echo "making $venv with $python (Python $("$python" -c "$version"))"
    "$python" -m venv --clear "$venv"
    echo "installing packages: about 5 GB, nearly all of it torch with CUDA. It takes minutes."
fi

started=$SECONDS
"$venv/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check \
    --editable '.[megatron,dev,plot]'
echo "$venv is ready after $((SECONDS - started)) s"
