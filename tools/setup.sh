#!/usr/bin/env bash
# Make .venv with the exact versions of constraints.txt. Called by make; PYTHON chooses the interpreter,
# WHEELHOUSE a directory of wheels to install from, without internet.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

pip_setting() { # a setting of pip, from its environment variable or its config files
    local variable="PIP_$1"
    if [ -n "${!variable:-}" ]; then
        echo "${!variable}"
    else
        "$python" -m pip config get "global.$2" 2>/dev/null || true
    fi
}

packages=(--constraint constraints.txt --editable '.[dev,bench]')
offline=()
if [ -n "${WHEELHOUSE:-}" ]; then
    if ! compgen -G "$WHEELHOUSE/*.whl" >/dev/null; then
        echo "setup: WHEELHOUSE is '$WHEELHOUSE', and there are no wheels in it." >&2
        echo "  fix: run 'make wheelhouse' where there is internet, and copy the directory here" >&2
        exit 69
    fi
    offline=(--no-index --find-links "$WHEELHOUSE")
fi

install_with_uv() { # $1: the uv command, which reads no pip settings: hand them on
    export UV_FIND_LINKS=${UV_FIND_LINKS:-$(pip_setting FIND_LINKS find-links | tr ' \n' ',,' | sed 's/,*$//')}
    export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$(pip_setting INDEX_URL index-url)}
    export UV_INDEX=${UV_INDEX:-$(pip_setting EXTRA_INDEX_URL extra-index-url | tr '\n' ' ')}
    for name in UV_FIND_LINKS UV_DEFAULT_INDEX UV_INDEX; do
        [ -n "${!name// /}" ] || unset "$name"
    done
    # An older release on the first index must not hide the pinned one on the next, as with pip.
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
    # Compiled, as by pip: nodes may see .venv read-only, and would compile at every start.
    "$1" pip install --quiet --compile-bytecode --python .venv/bin/python "${offline[@]}" "${packages[@]}"
}

install_with_pip() { # what is named
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "${offline[@]}" "$@"
}

refuse() {
    echo "setup: a package could not be installed; the reason is above." >&2
    echo "  fix: if it was being built, there was no wheel of it for this Python: install a compiler (apt-get install gcc" >&2
    echo "       python3-dev on Debian and Ubuntu) or name an older Python (make PYTHON=python3.13); if an index or a disk" >&2
    echo "       failed, see to it; then run make again" >&2
    exit 69
}

doing="setup: installing into .venv (a minute or two) …"
if command -v uv >/dev/null; then
    echo "$doing"
    # uv brings a Python where the system's is too old.
    uv venv --quiet --clear --python "${PYTHON:->=3.11}" .venv
    install_with_uv uv || refuse
else
    if ! version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
        echo "setup: cannot run '$python'. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11" >&2
        exit 69
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "setup: '$python' is Python $version; Forge needs 3.11 or newer." >&2
        echo "  fix: name a newer one (make PYTHON=python3.11), load a module that has one, or install uv, which brings its own" >&2
        exit 69
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "setup: '$python' cannot make virtual environments." >&2
        echo "  fix: apt-get install python3-venv (Debian, Ubuntu), or install uv" >&2
        exit 69
    fi
    echo "$doing"
    "$python" -m venv --clear .venv
    # pip takes several times as long as uv, and is there where uv is not, or does not reach an index.
    if ! { install_with_pip --constraint constraints.txt uv 2>/dev/null && install_with_uv .venv/bin/uv; }; then
        echo "setup: without uv, which could not be used; with pip (several minutes) …"
        install_with_pip "${packages[@]}" || refuse
    fi
fi
# Forge itself is installed as a link to its source, which no installer compiles.
.venv/bin/python -m compileall -q forge
touch .venv/ready
