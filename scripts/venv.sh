#!/usr/bin/env bash
# Makes or brings up to date the virtual environment that the Makefile works in: scripts/venv.sh DIRECTORY [INSTALL ARGUMENT...]
# PYTHON=... names an interpreter; otherwise the first of python3.12, python3, python3.13, python3.14 that is 3.12 or newer.
set -euo pipefail
venv=$1
shift

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.12 python3 python3.13 python3.14}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    if ! python=$(find_python); then
        echo "moax needs Python 3.12 or newer; ${PYTHON:-python3} here is: $("${PYTHON:-python3}" --version 2>&1 | head -n 1 || true)" >&2
        echo "Install one (pyenv install 3.12, uv python install 3.12, or your system's packages), or name one: make PYTHON=/path/to/python3.12 ..." >&2
        exit 1
    fi
    echo "Making $venv with $("$python" --version), in a few seconds"
    rm -rf "$venv"
    if command -v uv >/dev/null 2>&1; then
        uv venv --quiet --seed --python "$python" "$venv"
    else
        "$python" -m venv "$venv"
    fi
fi

# Runs a command, prints a dot every five seconds until the command ends, and returns its status. The dots are the job in
# the background: bash makes such a job ignore Ctrl-C.
with_dots() {
    local status=0 began=$SECONDS
    (while sleep 5 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do printf '.'; done) &
    local dots=$!
    "$@" || status=$?
    kill "$dots" 2>/dev/null || true
    wait "$dots" 2>/dev/null || true
    if ((SECONDS - began >= 5)); then echo; fi
    return "$status"
}

if command -v uv >/dev/null 2>&1; then
    echo "Installing into $venv by uv: $*"
    with_dots uv pip install --quiet --python "$venv/bin/python" "$@"
else
    echo "Downloading and installing into $venv by pip, in half a minute to two minutes: $*"
    with_dots "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile "$@"
    echo "Compiling the packages of $venv to bytecode, in about twenty seconds"
    # pip would compile on one core. A package may hold templates that are no Python, which do not compile.
    with_dots "$venv/bin/python" -m compileall -qq -j 0 "$venv"/lib/python*/site-packages || true
fi
