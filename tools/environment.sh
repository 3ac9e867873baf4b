#!/usr/bin/env bash
# Makes the development environment .venv from the pins in constraints/, with nothing but a Python to start from.
# Uses the uv that is installed, else fetches the pinned one into .venv-uv.
#   tools/environment.sh          make or complete .venv, install this project editable
#   tools/environment.sh uv ARGS  run uv with ARGS
set -euo pipefail
cd "$(dirname "$0")/.."
export UV_PYTHON_DOWNLOADS=never

fail() {
    printf 'environment: %s\n' "$1" >&2
    exit 1
}

is_usable() { # a Python that starts and is new enough (a version manager's stand-in may do neither)
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() { # prints the path of the interpreter itself
    local name
    for name in ${PYTHON:-python3.13 python3.12 python3.11 python3.14 python3}; do
        if is_usable "$name"; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "no Python 3.11 or newer found (tried ${PYTHON:-python3.13, 3.12, 3.11, 3.14, python3}). Fix: install one, or say PYTHON=/path/to/python"
}

has_uv() { # any uv from 0.5 on
    "$@" --version 2>/dev/null | grep -qE '^uv ([1-9]|0\.([5-9]|[1-9][0-9]))'
}

run_uv() {
    if has_uv uv; then
        uv "$@"
    elif has_uv .venv-uv/bin/uv; then
        .venv-uv/bin/uv "$@"
    else
        printf 'environment: uv is not installed; fetching it into .venv-uv\n' >&2
        rm -rf .venv-uv
        "$python" -m venv .venv-uv >&2 ||
            fail "$python cannot make a virtual environment. Fix: install its venv module (Debian: python3-venv), or uv"
        .venv-uv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
            --requirement constraints/uv.txt >&2 || fail "uv could not be fetched. Fix: see pip's message above, or install uv"
        .venv-uv/bin/uv "$@"
    fi
}

python=$(find_python)
if [ "${1:-}" = uv ]; then
    shift
    run_uv "$@"
    exit
fi

if ! is_usable .venv/bin/python; then
    rm -rf .venv
    run_uv venv --quiet --python "$python" .venv
fi
run_uv pip install --quiet --python .venv/bin/python --require-hashes --requirement constraints/dev.txt
# The build backend is among the pins, so that nothing unpinned is fetched for the build.
# Built anew each time: the build compiles dataplane/bagelplane/native/*.c.
run_uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --reinstall-package bagelplane \
    --editable .
[ -e dataplane/bagelplane/native/libresample.so ] ||
    printf 'environment: no compiled resampler, Pillow resizes (slower, same bits). Fix: install a C compiler, then: rm .venv/ready; make env\n' >&2
touch .venv/ready
