#!/usr/bin/env bash
# Make .venv with what training needs, in the exact versions of constraints.txt; with names of extras of
# pyproject.toml as arguments: add those. Called by make; PYTHON chooses the interpreter, WHEELHOUSE a directory of
# packages to install from, without internet.
set -euo pipefail
cd "$(dirname "$0")/.."
trap 'exit 130' INT # else an interrupted uv looks like one that cannot be used, and pip would start
python=${PYTHON:-python3}
uv=     # the one to install with; empty: pip
output= # of the last attempt to install
offline=()

refuse() { # problem, lines of what to do
    echo "setup: $1" >&2
    printf '  fix: %s\n' "$2" >&2
    shift 2
    [ $# = 0 ] || printf '       %s\n' "$@" >&2
    exit 69
}

refuse_changed() { # which file
    refuse "$1 is not the one that hashes.txt names: it was changed on its way here, or your index builds its own." \
        "get it again, from another index or copy; a wheelhouse belongs to the version of Forge that made it" \
        "(make wheelhouse). If you trust what you have: UV_NO_VERIFY_HASHES=1 make"
}

leave_venv() { # where .venv is active, its commands come first, and would be removed while they run
    if [ "$(dirname "$(command -v "$python")")" -ef .venv/bin ]; then
        python=$("$python" -c 'import sys; print(sys._base_executable)') || python=python3
        PYTHON=${PYTHON:+$python}
    fi
    local folder folders path=
    IFS=: read -ra folders <<<"$PATH"
    for folder in "${folders[@]}"; do
        [ "$folder" -ef .venv/bin ] || path+=${path:+:}$folder
    done
    export PATH=$path
    unset VIRTUAL_ENV
}

check_extras() { # names
    local known name
    known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[p/s/^\([a-z0-9]*\) = \[$/\1/p' pyproject.toml)
    for name in "$@"; do
        [[ $'\n'$known$'\n' == *$'\n'"$name"$'\n'* ]] ||
            refuse "pyproject.toml has no extra '$name'." "name one of these: ${known//$'\n'/, }"
    done
}

use_wheelhouse() { # after every file in it was found in hashes.txt, torch and what it brings excepted
    if ! compgen -G "$WHEELHOUSE/*.whl" >/dev/null; then
        refuse "WHEELHOUSE is '$WHEELHOUSE', and there are no wheels in it." \
            "run 'make wheelhouse' where there is internet, and copy the directory here"
    fi
    offline=(--no-index --find-links "$WHEELHOUSE")
    [ -z "${UV_NO_VERIFY_HASHES:-}" ] || return 0
    local sums digest file
    sums=$(find -L "$WHEELHOUSE" -maxdepth 1 -type f \( -name '*.whl' -o -name '*.tar.gz' -o -name '*.zip' \) \
        -exec sha256sum {} +)
    while read -r digest file; do
        case ${file##*/} in torch-* | triton-* | nvidia_* | cuda_*) continue ;; esac
        grep -q "sha256:$digest" hashes.txt || refuse_changed "$file"
    done <<<"$sums"
}

make_venv() {
    local doing="setup: installing into .venv (a minute or two) …" version
    if command -v uv >/dev/null; then
        echo "$doing"
        rm -f .venv/ready .venv/with-* # first, so that make starts again where this is interrupted
        # uv brings a Python where the system's is too old.
        uv venv --quiet --clear --python "${PYTHON:->=3.11}" .venv
        return
    fi
    if ! version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
        refuse "cannot run '$python'." "install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11"
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        refuse "'$python' is Python $version; Forge needs 3.11 or newer." \
            "name a newer one (make PYTHON=python3.11), load a module that has one, or install uv, which brings its own"
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        refuse "'$python' cannot make virtual environments." \
            "apt-get install python3-venv (Debian, Ubuntu), or install uv"
    fi
    echo "$doing"
    rm -f .venv/ready .venv/with-*
    "$python" -m venv --clear .venv
}

has_pip() {
    .venv/bin/python -m pip --version >/dev/null 2>&1
}

with_pip() { # what to install
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "${offline[@]}" "$@"
}

pip_setting() { # a setting of pip, from its environment variable or its config files
    local interpreter variable="PIP_$1"
    if [ -n "${!variable:-}" ]; then
        echo "${!variable}"
        return
    fi
    for interpreter in "$python" .venv/bin/python; do # Debian's has no pip, and its environments do
        "$interpreter" -m pip config get "global.$2" 2>/dev/null && return
    done
    return 0
}

choose_uv() { # from outside, else the one in .venv, which pip installs: several times as fast as pip
    uv=$(command -v uv || true)
    if [ -z "$uv" ] && [ ! -x .venv/bin/uv ]; then
        output=$(with_pip --require-hashes --requirement <(sed -n '/^uv==/,/[^\\]$/p' hashes.txt) 2>&1) || true
        [[ $output != *"DO NOT MATCH THE HASHES"* ]] || refuse_changed "the uv that pip found"
    fi
    [ -n "$uv" ] || [ ! -x .venv/bin/uv ] || uv=.venv/bin/uv
    [ -n "$uv" ] || say_pip "${output:-this Python has no pip}"
    # uv reads no settings of pip: hand them on.
    export UV_FIND_LINKS=${UV_FIND_LINKS:-$(pip_setting FIND_LINKS find-links | tr ' \n' ',,' | sed 's/,*$//')}
    export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$(pip_setting INDEX_URL index-url)}
    export UV_INDEX=${UV_INDEX:-$(pip_setting EXTRA_INDEX_URL extra-index-url | tr '\n' ' ')}
    # With a second index: an older release on the first must not hide the pinned one on the next, as with pip.
    # Without one there is nothing to choose.
    [ -z "${UV_INDEX// /}" ] || export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
    local name
    for name in UV_FIND_LINKS UV_DEFAULT_INDEX UV_INDEX; do
        [ -n "${!name// /}" ] || unset "$name"
    done
}

say_pip() { # why uv could not be used. Refuses to install with pip what nobody compares with hashes.txt
    if [ -z "${UV_NO_VERIFY_HASHES:-}" ] && [ "${#offline[@]}" = 0 ]; then
        echo "$1" >&2
        refuse "uv could not be used; the reason is above. Without it no package would be compared with hashes.txt." \
            "install uv (https://docs.astral.sh/uv), or give an index that has it (PIP_INDEX_URL, UV_DEFAULT_INDEX)," \
            "or a wheelhouse (make wheelhouse). If you trust your indexes: UV_NO_VERIFY_HASHES=1 make"
    fi
    echo "setup: without uv, which could not be used; with pip, which does not read hashes.txt (several minutes) …"
}

attempt() { # what to install; false where it failed. Refuses a package with another hash
    if [ -z "$uv" ]; then
        output=$(with_pip --constraint constraints.txt "$@" 2>&1)
        return
    fi
    # Compiled, as by pip: nodes may see .venv read-only, and would compile at every start.
    output=$("$uv" pip install --quiet --compile-bytecode --python .venv/bin/python "${offline[@]}" \
        --constraint constraints.txt --constraint hashes.txt --build-constraints hashes.txt "$@" 2>&1) && return
    if [[ $output == *"Hash mismatch"* ]]; then
        echo "$output" >&2
        refuse_changed "a package"
    fi
    return 1
}

install() { # the same; with pip where uv does not reach an index that pip does
    attempt "$@" && return
    echo "$output" >&2
    if [ -n "$uv" ] && [ -n "${UV_NO_VERIFY_HASHES:-}${offline[*]}" ] && has_pip; then
        say_pip ""
        uv=
        attempt "$@" && return
        echo "$output" >&2
    fi
    refuse "a package could not be installed; the reason is above." \
        "if it was being built, there was no wheel of it for this Python: install a compiler (apt-get install gcc" \
        "python3-dev on Debian and Ubuntu) or name an older Python (make PYTHON=python3.13); if an index or a disk" \
        "failed, see to it; then run make again"
}

use_own_cache() { # where uv cannot write its own: a home that is read-only
    local cache=${UV_CACHE_DIR:-$(echo ~/.cache/uv)}
    mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] && return
    UV_CACHE_DIR=$(pwd)/.snakemake/uv
    export UV_CACHE_DIR
    mkdir -p "$UV_CACHE_DIR"
    echo "setup: uv keeps its cache in $UV_CACHE_DIR, since it cannot write to $cache"
}

leave_venv
extras=("$@")
check_extras "$@"
[ -z "${WHEELHOUSE:-}" ] || use_wheelhouse
renew=true
if [ $# != 0 ] && { command -v uv >/dev/null || [ -x .venv/bin/uv ] || has_pip; }; then
    renew=false
    echo "setup: adding $* to .venv …"
    rm -f "${extras[@]/#/.venv/with-}"
else
    for stamp in .venv/with-*; do # what was added before comes back
        [ ! -e "$stamp" ] || extras+=("${stamp#.venv/with-}")
    done
    make_venv
fi
choose_uv
use_own_cache
install --editable ".${extras:+[$(IFS=, && echo "${extras[*]}")]}"
if $renew; then
    attempt gigatoken ||
        echo "setup: without gigatoken: tokenizing will be slower (make setup EXTRAS=gigatoken shows the reason)"
    # Forge itself is installed as a link to its source, which no installer compiles.
    .venv/bin/python -m compileall -q forge snakemake_executor_plugin_forge
    touch .venv/ready
fi
[ "${#extras[@]}" = 0 ] || touch "${extras[@]/#/.venv/with-}"
